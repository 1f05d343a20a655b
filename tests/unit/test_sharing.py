"""Who holds a GPU's memory: this process, others, or what cannot be told; and the list of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import pytest

from stepscope.gpu.process_memory import (
    DESCRIBED_S,
    HIDDEN,
    MOVED,
    NO_MEMORY,
    NOT_LISTED,
    OTHERS,
    OWN,
    ProcessMemoryTracker,
    shares,
)
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import DeviceSource
from tests.support.fake_machine import process as fake_process
from tests.support.fake_nvml import FakeClock

A, B = "GPU-aaaa", "GPU-bbbb"
GIB = 2**30
ME = os.getpid()


def process(pid: int, memory: int | None = GIB, **changes: Any) -> GpuProcess:
    return fake_process(
        pid, **{"memory": memory, "sm": None, "command": "python train.py"} | changes
    )


@pytest.mark.parametrize(
    ("processes", "used", "expected"),
    [
        ([process(ME), process(5, 2 * GIB)], 3.1 * GIB, (GIB, 2 * GIB, {})),
        ([process(ME)], GIB, (GIB, 0, {})),
        ([], 0.0, (None, 0, {OWN: NOT_LISTED})),
        ([process(5)], GIB, (None, GIB, {OWN: NOT_LISTED})),
        ([process(5)], None, (None, GIB, {OWN: NOT_LISTED})),
        ([process(ME), process(5, None)], 2 * GIB, (GIB, None, {OTHERS: NO_MEMORY})),
        ([process(ME, None)], 2 * GIB, (None, None, {OWN: NO_MEMORY, OTHERS: NO_MEMORY})),
        # In a container the driver may leave out processes of others; 2 % are the driver's.
        ([process(ME)], 2.5 * GIB, (GIB, 0, {})),
        ([process(ME)], 2.7 * GIB, (GIB, None, {OTHERS: HIDDEN})),
        ([process(ME)], 70 * GIB, (GIB, None, {OTHERS: HIDDEN})),
    ],
)
def test_memory_is_divided_between_this_process_and_the_others(
    processes: list[GpuProcess], used: float | None, expected: tuple[Any, ...]
) -> None:
    assert shares(processes, ME, used=used, total=80 * GIB) == expected


class Source:
    """Lists what a test sets."""

    def __init__(self) -> None:
        self.listed: dict[str, tuple[GpuProcess, ...] | None] = {}
        self.why: dict[str, str] = {}
        self.processes, self.reasons = self.listed.__getitem__, lambda uuid: self.why


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sharing(source: Source, clock: FakeClock) -> ProcessMemoryTracker:
    return ProcessMemoryTracker(cast(DeviceSource, source), clock)


def test_this_processs_memory_is_that_on_the_gpu_it_trains_on(
    sharing: ProcessMemoryTracker, source: Source
) -> None:
    source.listed |= {A: (process(ME, GIB),), B: (process(ME, 2 * GIB), process(5, 7))}
    sharing.training = B
    assert sharing.look(A, {}) == {OTHERS: 0.0}
    assert sharing.look(B, {}) == {OTHERS: 7.0}
    assert sharing.take_own() == {OWN: 2.0 * GIB}
    assert sharing.take_own() == {}, "once for each look"


def test_reasons_follow_the_training_gpu_and_the_driver(
    sharing: ProcessMemoryTracker, source: Source
) -> None:
    source.listed[A] = (process(5),)
    sharing.look(A, {})
    assert sharing.take_own() == sharing.reasons(A) == {}
    sharing.training = A
    assert sharing.reasons(A) == {OWN: NOT_LISTED}
    source.listed[A], source.why = None, {"processes": "permission"}
    assert sharing.look(A, {"gpu/mem_used": GIB}) == {}
    assert sharing.reasons(A) == {OTHERS: "permission", OWN: "permission"}
    assert sharing.reasons(B) == {}


def test_the_list_is_told_when_it_changes_and_not_more_often_than_every_five_seconds(
    sharing: ProcessMemoryTracker, source: Source, clock: FakeClock
) -> None:
    bobs = process(5, command="a.py --lr 1", user="bob", yours=False)
    source.listed[A] = (process(ME, sm=4.0), bobs)
    sharing.look(A, {})
    told = sharing.changed()
    assert told is not None
    mine = {"pid": ME, "user": "ada", "name": "python", "command": "python train.py"}
    mine |= {"memory": GIB, "sm": 4.0, "yours": True, "state": "running"}
    assert told[A][0] == mine
    assert told[A][1]["command"] == "python", "of another user no arguments"
    source.listed[A] = (process(ME), process(6))
    sharing.look(A, {})
    assert sharing.changed() is None
    clock.now += DESCRIBED_S
    told = sharing.changed()
    assert told is not None
    assert [one["pid"] for one in told[A]] == [ME, 6]
    clock.now += DESCRIBED_S
    assert sharing.changed() is None, "nothing new"
    source.listed[A] = None
    sharing.look(A, {})
    assert sharing.changed() == {}


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"sm": 50.0}, True),
        ({"memory": GIB + 2**20}, True),
        ({"memory": GIB + MOVED}, False),
        ({"memory": None}, False),
        ({"state": "zombie"}, False),
        ({"pid": 6}, False),
    ],
)
def test_small_changes_are_not_written(
    sharing: ProcessMemoryTracker,
    source: Source,
    clock: FakeClock,
    changes: dict[str, Any],
    is_same: bool,
) -> None:
    source.listed |= {A: (process(5),)}
    sharing.look(A, {})
    assert sharing.changed() is not None
    source.listed |= {A: (replace(process(5), **changes),)}
    sharing.look(A, {})
    clock.now += DESCRIBED_S
    assert (sharing.changed() is None) == is_same
