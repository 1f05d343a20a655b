"""Processes on a GPU: whose they are, what is kept of a command, and shares of time."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from stepscope.gpu.processes import (
    COMMAND_LIMIT,
    LOOK_AGAIN_S,
    ProcessInfo,
    ProcessInfoCache,
    program_of,
    sm_shares,
)
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


def test_a_process_has_a_name_a_command_and_a_user(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ProcessInfoCache().look(child.pid)
    assert found.command.endswith("-c input() --lr 0.1")
    assert found.user == pwd.getpwuid(os.getuid()).pw_name
    assert (found.yours, found.state) == (True, "running")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert not ProcessInfoCache().look(os.getpid()).yours


def test_a_command_that_was_empty_at_the_start_is_read_again(
    child: subprocess.Popen[bytes], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ProcessInfoCache(clock)
    with monkeypatch.context() as starting:
        starting.setattr(psutil.Process, "cmdline", lambda _self: [])
        assert table.look(child.pid).command == table.look(child.pid).name
    clock.now += LOOK_AGAIN_S
    assert table.look(child.pid).command.endswith("-c input() --lr 0.1")


def test_what_has_ended_keeps_its_name(child: subprocess.Popen[bytes], clock: FakeClock) -> None:
    table = ProcessInfoCache(clock)
    before = table.look(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert table.look(child.pid).state == "running", "of this half second"
    clock.now += LOOK_AGAIN_S
    zombie = table.look(child.pid)
    assert (zombie.state, zombie.command) == ("zombie", before.command)
    unseen = ProcessInfoCache().look(child.pid)
    assert (unseen.state, unseen.name[:6]) == ("zombie", "python")
    child.wait()
    clock.now += LOOK_AGAIN_S
    gone = table.look(child.pid)
    assert (gone.state, gone.command, gone.yours) == ("gone", before.command, True)
    assert table.look(2**22 + 1) == ProcessInfo("process 4194305"), "never seen"


def test_a_number_that_is_used_again_is_another_process(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    table = ProcessInfoCache(clock)
    table.look(os.getpid())
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 5.0)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: ["x" * 5000])
    clock.now += LOOK_AGAIN_S
    assert table.look(os.getpid()).command == "x" * COMMAND_LIMIT


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("a.py --token abc", "a.py"),
        ("/usr/bin/python3.11 -u -W ignore train.py --password abc", "python3.11"),
        ("python train.py https://me:abc@host/x", "python train.py"),
        ("python -c login(token='abc')", "python"),
        ("python -cimport os;k='abc' arg", "python"),
        ("python -uc k='abc';run(k)", "python"),
        ("python -mmypkg.train --password abc", "python"),
        ("python - --token abc", "python"),
        ("python --api-key abc", "python"),
        ("python -X dev train.py", "python"),
        ("python -u -O /home/me/train.py --lr 1", "python train.py"),
        ("python -m", "python -m"),
        ("sh -c HF_TOKEN=abc python train.py", "sh"),
        ("python", "python"),
        ("", ""),
    ],
)
def test_a_program_is_named_without_its_arguments(command: str, shown: str) -> None:
    assert program_of(command) == shown


@dataclass
class Sample:
    """As NVML gives it."""

    pid: int
    timeStamp: int
    smUtil: int


def test_shares_are_the_newest_of_listed_processes() -> None:
    samples = [Sample(1, 5, 20), Sample(1, 9, 30), Sample(2, 8, 101), Sample(3, 3, 50)]
    samples += [Sample(77, 12, 40), Sample(1, 7, 99)]
    assert sm_shares(samples, {1, 2, 3, 4}, 4) == ({1: 30.0, 2: 0.0, 3: 0.0, 4: 0.0}, 12)
    for stale in ([Sample(1, 4, 20)], [Sample(1, 5, 4_000_000_000)], []):
        assert sm_shares(stale, {1}, 4) == ({}, 4), "without a fresh sample nothing is known"
