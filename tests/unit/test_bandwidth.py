"""Bandwidths of collectives, and of the links between GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.distributed.collective_metrics import (
    Interconnect,
    algorithm_bytes,
    bus_factor,
    link_of,
)
from tests.support.fake_machine import facts, info

GPU = facts(info(), nvlinks=0, nvlink_speed=None, pcie_max_gen=5, pcie_max_width=16)


def test_nvlink_counts_all_links_that_are_up() -> None:
    h100 = replace(GPU, nvlinks=18, nvlink_speed=26_562e6)
    assert link_of(h100) == Interconnect("18 NVLinks", 18 * 26_562e6)
    assert link_of(replace(h100, nvlinks=1)) == Interconnect("1 NVLink", 26_562e6)
    assert link_of(replace(h100, nvlink_speed=None)) is None, "not PCIe"


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    # The usual figures for one direction, such as 31.5 GB/s for PCIe 4.0 x16.
    [(3, 16, 15.75), (4, 16, 31.5), (5, 8, 31.5), (6, 16, 121.0)],
)
def test_pcie_by_generation_and_width(generation: int, width: int, gigabytes: float) -> None:
    link = link_of(replace(GPU, pcie_max_gen=generation, pcie_max_width=width))
    assert link is not None
    assert link.bytes_per_s == pytest.approx(gigabytes * 1e9, rel=0.002)
    for unknown in ({"pcie_max_gen": 9}, {"pcie_max_gen": None}, {"pcie_max_width": None}):
        assert link_of(replace(GPU, **unknown)) is None


@pytest.mark.parametrize(
    ("factor", "operations"),
    [
        (2 * 7 / 8, "all_reduce allreduce_coalesced"),
        (7 / 8, "reduce_scatter _reduce_scatter_base all_gather _all_gather_base all_to_all"),
        (7 / 8, "all_gather_into_tensor_coalesced gather scatter"),
        (1.0, "broadcast reduce"),
        (None, "all_reduce_barrier send coalesced"),
    ],
)
def test_the_factor_of_eight_ranks(factor: float | None, operations: str) -> None:
    for operation in operations.split():
        assert bus_factor(operation, 8) == factor, operation
    assert [bus_factor("all_reduce", ranks) for ranks in (0, 1, 2)] == [None, None, 1.0]


def test_the_size_is_that_of_the_whole_array() -> None:
    assert algorithm_bytes("_all_gather_base", 1, 8) == 8
    assert algorithm_bytes("_reduce_scatter_base", 8, 1) == 8
    assert algorithm_bytes("all_to_all", 4, 4) == 4
