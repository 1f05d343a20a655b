"""The memory ledger: its parts sum to the total, and what cannot be told apart is one part."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
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
from stepscope.metrics import BY_KEY
from tests.support.ledger_rows import CUDA

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


def said(
    values: Values, place: MemoryDomain = MemoryDomain.DEVICE, **missing: str
) -> tuple[str, ...]:
    return notes(amounts(values, place), place, missing)


def without(values: Values, *keys: str) -> dict[str, float | None]:
    return {key: value for key, value in values.items() if key not in keys}


def test_a_gpu_with_every_reading_is_told_apart_to_the_byte() -> None:
    assert amounts(CUDA) == {
        "free": 40 * GIB - 500 * MIB,
        "driver": 500 * MIB,
        "others": 10 * GIB,
        "unnamed": 1 * GIB,
        "outside": 1 * GIB,
        "split": 3 * GIB,
        "cached": 5 * GIB,
        "activations": 12 * GIB,
        "optimizer_state": 4 * GIB,
        "gradients": 2 * GIB,
        "parameters": 2 * GIB,
    }
    assert sum(amounts(CUDA).values()) == 80 * GIB
    assert said(CUDA) == ()


def test_what_every_process_is_named_for_leaves_nothing_unattributed() -> None:
    assert "unnamed" not in amounts(CUDA | {"gpu/mem_others": 11 * GIB})


def test_a_real_zero_is_a_part_of_zero_bytes() -> None:
    found = amounts(CUDA | {"memory/gradients": 0, "gpu/mem_others": 0})
    assert (found["gradients"], found["others"]) == (0, 0)


def test_hidden_processes_are_merged_with_a_reason() -> None:
    hidden = without(CUDA, "memory/process_used", "gpu/mem_others")
    assert amounts(hidden)["elsewhere"] == 12 * GIB
    assert not {"others", "outside", "unnamed"} & set(amounts(hidden))
    assert said(hidden, **{"memory/process_used": "not supported in WSL."}) == (
        (
            "Other processes cannot be separated from this one's memory outside PyTorch: "
            "not supported in WSL."
        ),
    )


def test_a_reason_that_nobody_gave_is_said_to_be_none() -> None:
    (note,) = said(without(CUDA, "memory/process_used", "gpu/mem_others"))
    assert note.endswith(f": {NOT_RECORDED}.")


def test_with_the_others_known_only_this_process_stays_merged() -> None:
    assert amounts(without(CUDA, "memory/process_used"))["elsewhere"] == 2 * GIB
    assert amounts(without(CUDA, "memory/process_used"))["others"] == 10 * GIB
    (note,) = said(without(CUDA, "memory/process_used"))
    assert note.startswith("This process outside PyTorch and memory of no named process")


def test_with_only_this_process_known_the_rest_is_nobodys() -> None:
    assert amounts(without(CUDA, "gpu/mem_others"))["unnamed"] == 11 * GIB
    (note,) = said(without(CUDA, "gpu/mem_others"))
    assert note.startswith("Who holds the memory outside this process is unknown")


def test_without_the_allocator_a_process_is_whole() -> None:
    values = without(CUDA, *ALLOCATOR)
    assert amounts(values)["process"] == 29 * GIB
    assert said(values, **{"memory/reserved": "CUDA has not been started"}) == (
        "What PyTorch holds of this process's memory is not known: CUDA has not been started.",
    )


def test_an_allocator_that_tells_half_counts_as_silent() -> None:
    assert amounts(without(CUDA, "memory/allocated"))["process"] == 29 * GIB


def test_without_a_word_of_processes_or_allocator_all_use_is_one_part() -> None:
    values = without(CUDA, *ALLOCATOR, "memory/process_used", "gpu/mem_others")
    assert amounts(values) == {"free": 40 * GIB - 500 * MIB, "driver": 500 * MIB, "used": 40 * GIB}
    recording = without(CUDA, *ALLOCATOR, "memory/process_used")
    assert (amounts(recording)["others"], amounts(recording)["used"]) == (10 * GIB, 30 * GIB)


def test_an_old_driver_counts_its_reserve_as_used() -> None:
    assert amounts(without(CUDA, "gpu/mem_reserved"))["free"] == 40 * GIB
    assert said(without(CUDA, "gpu/mem_reserved"))[0].startswith(
        "The driver's own reserve cannot be told apart"
    )


def test_without_the_device_only_what_pytorch_holds_is_divided() -> None:
    values = without(CUDA, *DEVICE, "memory/process_used")
    assert sum(amounts(values).values()) == 28 * GIB
    found = said(values, **{"gpu/mem_used": "No NVIDIA driver library was found"})
    assert found[0].endswith("unknown: No NVIDIA driver library was found.")


@pytest.mark.parametrize("key", TENSORS)
def test_allocated_stays_whole_where_one_kind_of_tensors_is_not_known(key: str) -> None:
    found = amounts(without(CUDA, key))
    assert found["allocated"] == 20 * GIB
    assert not {"parameters", "gradients", "optimizer_state", "activations"} & set(found)


def test_cache_stays_whole_where_its_fragments_are_not_known() -> None:
    found = amounts(without(CUDA, "memory/inactive_split"))
    assert found["cache"] == 8 * GIB
    assert not {"split", "cached"} & set(found)


def test_nothing_known_is_no_ledger() -> None:
    assert divide({}, MemoryDomain.DEVICE) is None
    assert divide({"gpu/mem_total": 80 * GIB}, MemoryDomain.DEVICE) is None
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
    assert said(CPU, MemoryDomain.HOST) == ()


def test_on_the_host_what_is_not_known_is_merged() -> None:
    alone = said(without(CPU, "process/children_rss"), MemoryDomain.HOST)
    assert amounts(without(CPU, "process/children_rss"), MemoryDomain.HOST)["elsewhere"] == 6 * GIB
    assert alone[0].startswith("Workers and other processes cannot be told apart")
    assert amounts(without(CPU, *TENSORS), MemoryDomain.HOST)["process"] == 3 * GIB
    assert amounts(without(CPU, "process/rss"), MemoryDomain.HOST) == {
        "free": 7 * GIB,
        "used": 9 * GIB,
    }
    hostless = amounts(without(CPU, "host/mem_total"), MemoryDomain.HOST)
    assert sum(hostless.values()) == 5 * GIB


def test_pages_that_workers_share_do_not_count_twice() -> None:
    found = amounts(CPU | {"process/children_rss": 8 * GIB}, MemoryDomain.HOST)
    assert (found["workers"], found["others"]) == (6 * GIB, 0)


def test_every_input_is_a_metric_in_bytes_and_every_part_has_words() -> None:
    for keys in INPUTS.values():
        assert {BY_KEY[key].unit for key in keys} == {"B"}
    for categories in CATEGORIES.values():
        assert len({category.key for category in categories}) == len(categories)
        for category in categories:
            assert category.help.endswith(".")
            assert category.label == category.label.strip()


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
def test_parts_are_never_negative_and_sum_to_the_total(
    place: MemoryDomain, data: st.DataObject
) -> None:
    values = data.draw(readings(place))
    found = divide(values, place)
    if found is None:
        return
    assert min(found.values()) >= 0
    assert found.keys() <= {category.key for category in CATEGORIES[place]}
    if "free" in found:
        assert sum(found.values()) == round(values[INPUTS[place][0]] or 0)


# Of a group a moment has only one entry: either the merged part or those that it stands for.
EITHER = {
    MemoryDomain.DEVICE: (
        ({"allocated"}, {"activations", "optimizer_state", "gradients", "parameters"}),
        ({"cache"}, {"split", "cached"}),
        ({"elsewhere"}, {"outside", "unnamed"}),
        ({"used"}, {"outside", "unnamed", "process", "elsewhere", "allocated", "cached", "cache"}),
        ({"process"}, {"outside", "allocated", "activations", "cached", "cache"}),
    ),
    MemoryDomain.HOST: (
        ({"process"}, {"rest", "optimizer_state", "gradients", "parameters"}),
        ({"elsewhere"}, {"others", "workers"}),
        ({"used"}, {"process", "rest", "others", "elsewhere", "workers"}),
    ),
}


@pytest.mark.parametrize("place", list(MemoryDomain))
@given(data=st.data())
def test_a_merged_part_never_stands_beside_what_it_stands_for(
    place: MemoryDomain, data: st.DataObject
) -> None:
    keys = set(divide(data.draw(readings(place)), place) or {})
    for merged, apart in EITHER[place]:
        assert not (keys & merged and keys & apart)


@pytest.mark.parametrize("place", list(MemoryDomain))
@given(data=st.data())
def test_a_missing_reading_is_no_zero(place: MemoryDomain, data: st.DataObject) -> None:
    """Whatever is taken away, the total stays, and a part that needs the reading is gone."""
    base = {MemoryDomain.DEVICE: CUDA, MemoryDomain.HOST: CPU}[place]
    gone = data.draw(st.sets(st.sampled_from(INPUTS[place][2:])))
    values: dict[str, float | None] = {
        key: None if key in gone else value for key, value in base.items()
    }
    found = amounts(values, place)
    assert sum(found.values()) == base[INPUTS[place][0]]
    needs = {
        "driver": "gpu/mem_reserved",
        "outside": "memory/process_used",
        "workers": "process/children_rss",
        "cached": "memory/inactive_split",
        "parameters": "memory/parameters",
        "activations": "memory/gradients",
    }
    for part, key in needs.items():
        assert not (key in gone and part in found)
    if place is MemoryDomain.DEVICE:
        assert ("others" in found) is ("gpu/mem_others" not in gone)
    assert bool(said(values, place)) is bool(gone)


@given(st.integers(0, 80 * GIB), st.integers(0, 80 * GIB))
@example(0, 0)
def test_more_allocated_never_makes_free_memory(less: int, more: int) -> None:
    low, high = sorted((less, more))
    first = amounts(CUDA | {"memory/allocated": low, "memory/reserved": low})
    second = amounts(CUDA | {"memory/allocated": high, "memory/reserved": high})
    assert first["free"] == second["free"]  # the driver's figure of use is believed
    assert first["outside"] >= second["outside"]
