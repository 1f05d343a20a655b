"""Processes on a GPU: names, commands, users, and the shares of its time and memory."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from stepscope.gpu import processes
from stepscope.gpu.nvml_device import NvmlDevice
from stepscope.gpu.process_memory import (
    DESCRIBED_S,
    HIDDEN,
    NO_MEMORY,
    OTHERS,
    OWN,
    OWN_NOT_LISTED,
    ProcessMemoryTracker,
    shares,
)
from stepscope.gpu.processes import COMMAND_LIMIT, GpuProcess, GpuProcessList, program_of
from stepscope.gpu.source import DeviceSource
from tests.support.fake_machine import process as fake_process
from tests.support.fake_nvml import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its end."""
    program = [sys.executable, "-c", "input()", "--lr", "0.1"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while not psutil.Process(process.pid).cmdline():  # empty for an instant after exec
            pass
        yield process
        process.kill()


class Device:
    """A GPU with these compute processes, by an `NvmlDevice`'s methods."""

    def __init__(self, *pids: int) -> None:
        self.listed = [SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in pids]
        self.library = SimpleNamespace(clock=FakeClock())

    def query(self, calls: Sequence[Any]) -> list[Any]:
        return self.listed if calls is processes._COMPUTE else []


def reader(*pids: int) -> Callable[[], GpuProcess]:
    """Return a reader of the first process of a GPU."""
    listing = GpuProcessList(cast(NvmlDevice, Device(*pids)))
    return lambda: (listing.read() or ())[0]


def test_a_process_has_a_name_a_command_and_a_user(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reader(child.pid)()
    assert found.command.endswith("-c input() --lr 0.1")
    assert found.user == pwd.getpwuid(os.getuid()).pw_name
    assert (found.yours, found.state, found.memory) == (True, "running", GIB)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert not reader(ME)().yours


def test_what_has_ended_keeps_its_name(child: subprocess.Popen[bytes]) -> None:
    read = reader(child.pid)
    running = read()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read() == replace(running, state="zombie")
    child.wait()
    assert read() == replace(running, state="gone")
    unknown = reader(2**22 + 1)()
    assert (unknown.name, unknown.state, unknown.yours) == ("process 4194305", "gone", False)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("a.py --token abc", "a.py"),
        ("/usr/bin/python3.11 -u -W ignore train.py --password abc", "python3.11 train.py"),
        ("python -c login(token='abc')", "python"),
        ("python -mmypkg.train --password abc", "python"),
        ("sh -c HF_TOKEN=abc python train.py", "sh train.py"),
        ("", ""),
    ],
)
def test_a_program_is_named_without_its_arguments(command: str, shown: str) -> None:
    assert program_of(command) == shown


A, B = "GPU-aaaa", "GPU-bbbb"
GIB = 2**30
ME = os.getpid()


def process(pid: int, memory: int | None = GIB, **changes: Any) -> GpuProcess:
    return fake_process(pid, memory=memory, **changes)


@pytest.mark.parametrize(
    ("listed", "used", "expected"),
    [
        ([process(ME), process(5, 2 * GIB)], 3.1 * GIB, (GIB, 2 * GIB, {})),
        ([], 0.0, (None, 0, {OWN: OWN_NOT_LISTED})),
        ([process(5)], None, (None, GIB, {OWN: OWN_NOT_LISTED})),
        ([process(ME), process(5, None)], 2 * GIB, (GIB, None, {OTHERS: NO_MEMORY})),
        ([process(ME, None)], 2 * GIB, (None, None, {OWN: NO_MEMORY, OTHERS: NO_MEMORY})),
        # In a container the driver may leave out processes of others; 2 % are the driver's.
        ([process(ME)], 2.5 * GIB, (GIB, 0, {})),
        ([process(ME)], 2.7 * GIB, (GIB, None, {OTHERS: HIDDEN})),
    ],
)
def test_memory_is_divided_between_this_process_and_the_others(
    listed: list[GpuProcess], used: float | None, expected: tuple[Any, ...]
) -> None:
    assert shares(listed, ME, used=used, total=80 * GIB) == expected


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
def sharing(source: Source, clock: FakeClock) -> ProcessMemoryTracker:
    return ProcessMemoryTracker(cast(DeviceSource, source), clock)


def test_this_processs_memory_is_that_on_the_gpu_it_trains_on(
    sharing: ProcessMemoryTracker, source: Source
) -> None:
    source.listed |= {A: (process(ME, GIB),), B: (process(ME, 2 * GIB), process(5, 7))}
    sharing.training = B
    assert sharing.update(A, {}) == {OTHERS: 0.0}
    assert sharing.update(B, {}) == {OTHERS: 7.0}
    assert sharing.take_own() == {OWN: 2.0 * GIB}
    assert sharing.take_own() == {}, "once for each query"


def test_reasons_follow_the_training_gpu_and_the_driver(
    sharing: ProcessMemoryTracker, source: Source
) -> None:
    source.listed[A] = (process(5),)
    sharing.update(A, {})
    assert sharing.take_own() == sharing.reasons(A) == {}
    sharing.training = A
    assert sharing.update(A, {}) == {}, "the listed one may be this process, with another pid"
    assert sharing.reasons(A) == {OWN: OWN_NOT_LISTED, OTHERS: OWN_NOT_LISTED}
    source.listed[A], source.why = None, {"processes": "permission"}
    assert sharing.update(A, {"gpu/mem_used": GIB}) == {}
    assert sharing.reasons(A) == {OTHERS: "permission", OWN: "permission"}
    assert sharing.reasons(B) == {}


def test_the_list_is_told_when_it_changes_and_not_more_often_than_every_five_seconds(
    sharing: ProcessMemoryTracker, source: Source, clock: FakeClock
) -> None:
    bobs = process(5, command="a.py --lr 1", user="bob", yours=False)
    source.listed[A] = (process(ME), bobs)
    sharing.update(A, {})
    told = sharing.changed()
    assert told is not None
    assert told[A][0]["command"] == "python train.py"
    assert told[A][1]["command"] == "python", "of another user no arguments"
    source.listed[A] = (process(ME), process(6))
    sharing.update(A, {})
    assert sharing.changed() is None
    clock.now += DESCRIBED_S
    told = sharing.changed()
    assert told is not None
    assert [one["pid"] for one in told[A]] == [ME, 6]
    clock.now += DESCRIBED_S
    assert sharing.changed() is None, "nothing new"
    source.listed[A] = None
    sharing.update(A, {})
    assert sharing.changed() == {}


def test_a_number_that_is_used_again_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader(ME)
    first = read()
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: ["x" * 5000])
    assert read() == first, "read once"
    monkeypatch.setattr(psutil.Process, "__eq__", lambda process, other: False)
    assert read().command == "x" * COMMAND_LIMIT
