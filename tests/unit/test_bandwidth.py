"""Size and bus bandwidth of collectives."""

from __future__ import annotations

import pytest

from stepscope.distributed.collective_metrics import algorithm_bytes, bus_factor


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
