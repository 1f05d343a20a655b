"""What collectives cost: links by what the driver tells, shares, and the sentences about them."""

from __future__ import annotations

import math

import pytest

from stepscope.distributed.communication import (
    Interconnect,
    link_of,
    sentences,
)

H100 = {"nvlinks": 18, "nvlink_speed": 26_562e6, "pcie_max_gen": 5, "pcie_max_width": 16}


def test_nvlink_counts_all_links_that_are_up() -> None:
    assert link_of(H100) == Interconnect("18 NVLinks", 18 * 26_562e6)
    assert link_of({"nvlinks": 1, "nvlink_speed": 14e9}) == Interconnect("1 NVLink", 14e9)


def test_nvlinks_of_unknown_speed_are_not_taken_for_pcie() -> None:
    assert link_of(H100 | {"nvlink_speed": None}) is None


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    # The usual figures for one direction, such as 31.5 GB/s for PCIe 4.0 x16.
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.75), (4, 16, 31.5), (5, 8, 31.5), (6, 16, 121.0)],
)
def test_pcie_by_generation_and_width(generation: int, width: int, gigabytes: float) -> None:
    link = link_of({"nvlinks": 0, "pcie_max_gen": generation, "pcie_max_width": width})
    assert link is not None
    assert link.bytes_per_s == pytest.approx(gigabytes * 1e9, rel=0.002)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"pcie_max_gen": 9, "pcie_max_width": 16},
        {"pcie_max_gen": 4, "pcie_max_width": None},
        # Not as a driver tells it: a run's file may have been written by others.
        {"pcie_max_gen": 4, "pcie_max_width": "x"},
        {"pcie_max_gen": 4, "pcie_max_width": -16},
        {"pcie_max_gen": True, "pcie_max_width": 16},
        {"nvlinks": "x", "nvlink_speed": 2},
        {"nvlinks": -18, "nvlink_speed": 25e9},
        {"nvlinks": 10**400, "nvlink_speed": 25e9},
        {"nvlinks": 18, "nvlink_speed": []},
        {"nvlinks": 18, "nvlink_speed": -1.0},
        {"nvlinks": 18, "nvlink_speed": 1e308},
        {"nvlinks": 18, "nvlink_speed": math.nan},
    ],
)
def test_an_unknown_link_is_none(facts: dict[str, object]) -> None:
    assert link_of(facts) is None


def test_all_is_said_that_is_known() -> None:
    means = {"comm/bytes": 100 * 2**20, "comm/rate": 2 * 2**30, "comm/bus_bandwidth": 239e9}
    means |= {"comm/time": 0.012, "perf/step_time": 0.048, "perf/comm_wait": 0.003}
    assert sentences(means, link_of(H100)) == [
        "Each step passes 100 MiB to collectives, 2.00 GiB a second.",
        (
            "The device spends 12.0 ms per step in them, 25% of its 48.0 ms, including "
            "waiting for other ranks."
        ),
        "75% of that overlaps with the backward pass.",
        (
            "Large collectives reach 239 GB/s bus bandwidth, 50% of the peak of 18 "
            "NVLinks (478 GB/s). They wait for other ranks, or do not go over this link."
        ),
    ]


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert sentences({}) == []
    assert sentences({"comm/bytes": 512.0}) == ["Each step passes 512 B to collectives."]
    (said,) = sentences({"comm/bus_bandwidth": 1e9})
    assert "; the link's peak is unknown." in said
    little = {"comm/time": 0.001, "perf/step_time": 0.1, "perf/comm_wait": 0.0}
    assert len(sentences(little)) == 1
