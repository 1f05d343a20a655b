"""The memory breakdown: categories sum to the total, and a missing one belongs to the rest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.memory.breakdown import (
    CATEGORIES,
    NOT_RECORDED,
    TENSORS,
    MemoryDomain,
    Values,
    divide,
    notes,
)
from tests.support.breakdown_rows import CUDA

MIB, GIB = 2**20, 2**30
DEVICE = ("gpu/mem_total", "gpu/mem_used", "gpu/mem_reserved", "gpu/mem_others")
ALLOCATOR = ("memory/reserved", "memory/allocated", "memory/inactive_split")
HOST = ("host/mem_total", "host/mem_used", "process/rss", "process/children_rss")
INPUTS = {
    MemoryDomain.DEVICE: (*DEVICE, "memory/process_used", *ALLOCATOR, *TENSORS),
    MemoryDomain.HOST: (*HOST, *TENSORS),
}

CPU: dict[str, float | None] = {
    "host/mem_total": 16 * GIB,
    "host/mem_used": 9 * GIB,
    "process/rss": 3 * GIB,
    "process/children_rss": 2 * GIB,
    "memory/parameters": 100 * MIB,
    "memory/gradients": 0,
    "memory/optimizer_state": 200 * MIB,
}


def amounts(values: Values, place: MemoryDomain = MemoryDomain.DEVICE) -> dict[str, int]:
    found = divide(values, place)
    assert found is not None
    return found


def without(values: Values, *keys: str) -> dict[str, float | None]:
    return {key: value for key, value in values.items() if key not in keys}


def test_a_gpu_with_every_reading_is_told_apart_to_the_byte() -> None:
    assert amounts(CUDA) == {
        "free": 40 * GIB - 500 * MIB,
        "driver": 500 * MIB,
        "others": 10 * GIB,
        "elsewhere": 1 * GIB,
        "outside": 1 * GIB,
        "split": 3 * GIB,
        "cached": 5 * GIB,
        "activations": 12 * GIB,
        "optimizer_state": 4 * GIB,
        "gradients": 2 * GIB,
        "parameters": 2 * GIB,
    }
    assert sum(amounts(CUDA).values()) == 80 * GIB
    assert notes(amounts(CUDA), MemoryDomain.DEVICE, {}) == ()


PROCESSES = ("memory/process_used", "gpu/mem_others")
MERGED: list[tuple[tuple[str, ...], dict[str, int]]] = [
    (PROCESSES, {"elsewhere": 12 * GIB}),
    (("gpu/mem_others",), {"elsewhere": 11 * GIB, "outside": GIB}),
    (ALLOCATOR, {"free": 40 * GIB - 500 * MIB, "outside": 29 * GIB, "others": 10 * GIB}),
    (("gpu/mem_reserved",), {"free": 40 * GIB}),
    ((*DEVICE, "memory/process_used"), {"split": 3 * GIB, "cached": 5 * GIB}),
    (TENSORS, {"activations": 20 * GIB}),
]
MERGED_HOST: list[tuple[tuple[str, ...], dict[str, int]]] = [
    (("process/children_rss",), {"others": 6 * GIB}),
    (TENSORS, {"rest": 3 * GIB}),
    (("process/rss",), {"free": 7 * GIB, "workers": 2 * GIB, "others": 7 * GIB}),
    (("host/mem_total",), {"workers": 2 * GIB}),
]


@pytest.mark.parametrize(
    ("place", "missing", "parts"),
    [(MemoryDomain.DEVICE, *case) for case in MERGED]
    + [(MemoryDomain.HOST, *case) for case in MERGED_HOST],
)
def test_a_missing_category_belongs_to_the_rest_with_a_reason(
    place: MemoryDomain, missing: tuple[str, ...], parts: dict[str, int]
) -> None:
    found = amounts(without(CUDA if place is MemoryDomain.DEVICE else CPU, *missing), place)
    assert found.items() >= parts.items()
    told = notes(found, place, dict.fromkeys(missing, "not supported in WSL."))
    assert any(one.endswith(": not supported in WSL.") for one in told)
    assert any(one.endswith(f": {NOT_RECORDED}.") for one in notes(found, place, {}))


def test_zero_is_a_value_and_no_unattributed_memory_is_no_category() -> None:
    one_of_two = amounts(without(CUDA, "memory/allocated"))
    assert "cached" not in one_of_two, "an allocator with one of two values counts as missing"
    found = amounts(CUDA | {"memory/gradients": 0, "gpu/mem_others": 0})
    assert (found["gradients"], found["others"]) == (0, 0)
    assert "elsewhere" not in amounts(CUDA | {"gpu/mem_others": 15 * GIB}), "more than there is"


def test_nothing_known_is_no_breakdown() -> None:
    assert divide({}, MemoryDomain.DEVICE) is None
    assert divide({"host/mem_total": 16 * GIB}, MemoryDomain.HOST) is None


def test_readings_that_contradict_are_believed_in_the_documented_order() -> None:
    late = CUDA | {"memory/reserved": 41 * GIB, "memory/process_used": 5 * GIB}
    found = amounts(late)
    assert (
        found["cached"] + found["split"] + 20 * GIB == 40 * GIB
    )  # reserved is cut to what is used
    assert (found["outside"], found["others"]) == (0, 0)
    small = amounts(CUDA | {"memory/allocated": 5 * GIB})
    assert (small["parameters"], small["optimizer_state"], small["gradients"]) == (
        2 * GIB,
        3 * GIB,
        0,
    )
    assert small["activations"] == 0


def test_the_host_is_told_apart_to_the_byte() -> None:
    assert amounts(CPU, MemoryDomain.HOST) == {
        "free": 7 * GIB,
        "others": 4 * GIB,
        "workers": 2 * GIB,
        "rest": 3 * GIB - 300 * MIB,
        "optimizer_state": 200 * MIB,
        "gradients": 0,
        "parameters": 100 * MIB,
    }
    assert notes(amounts(CPU, MemoryDomain.HOST), MemoryDomain.HOST, {}) == ()
    shared = amounts(CPU | {"process/children_rss": 8 * GIB}, MemoryDomain.HOST)
    assert (shared["workers"], shared["others"]) == (6 * GIB, 0), "shared pages count once"


SIZES = st.one_of(
    st.none(),
    st.integers(0, 200 * GIB).map(float),
    st.floats(0, 200 * GIB),
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0]),
)


def readings(place: MemoryDomain) -> st.SearchStrategy[dict[str, float | None]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(INPUTS[place], SIZES))


@pytest.mark.parametrize("place", list(MemoryDomain))
@given(data=st.data())
def test_categories_sum_to_the_total(place: MemoryDomain, data: st.DataObject) -> None:
    values = data.draw(readings(place))
    found = divide(values, place)
    if found is None:
        return
    assert min(found.values()) >= 0
    assert found.keys() <= {category.key for category in CATEGORIES[place]}
    if "free" in found:
        assert sum(found.values()) == round(values[INPUTS[place][0]] or 0)
