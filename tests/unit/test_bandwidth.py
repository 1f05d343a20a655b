"""Bus bandwidth by the formulas of nccl-tests' doc/PERFORMANCE.md."""

from __future__ import annotations

import pytest

from stepscope.distributed.collective_metrics import algorithm_bytes, bus_factor

MIB = 2**20


FACTORS = [
    ("all_reduce", 2 * 7 / 8),
    ("allreduce_coalesced", 2 * 7 / 8),
    ("reduce_scatter", 7 / 8),
    ("_reduce_scatter_base", 7 / 8),
    ("reduce_scatter_tensor_coalesced", 7 / 8),
    ("all_gather", 7 / 8),
    ("_all_gather_base", 7 / 8),
    ("all_gather_into_tensor_coalesced", 7 / 8),
    ("all_to_all", 7 / 8),
    ("gather", 7 / 8),
    ("scatter", 7 / 8),
    ("broadcast", 1.0),
    ("reduce", 1.0),
    ("all_reduce_barrier", None),
    ("send 0->1", None),
    ("coalesced", None),
]


def test_the_factor_of_eight_ranks(subtests: pytest.Subtests) -> None:
    for operation, factor in FACTORS:
        with subtests.test(operation):
            assert bus_factor(operation, 8) == factor


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_rank_moves_nothing(ranks: int) -> None:
    assert bus_factor("all_reduce", ranks) is None


def test_two_ranks_move_an_all_reduce_once() -> None:
    assert bus_factor("all_reduce", 2) == 1.0


def test_the_size_is_that_of_the_whole_array() -> None:
    assert algorithm_bytes("_all_gather_base", MIB, 8 * MIB) == 8 * MIB
    assert algorithm_bytes("_reduce_scatter_base", 8 * MIB, MIB) == 8 * MIB
    assert algorithm_bytes("all_reduce", MIB, MIB) == MIB
    assert algorithm_bytes("all_to_all", 4 * MIB, 4 * MIB) == 4 * MIB
