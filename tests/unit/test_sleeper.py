"""The writer thread's sleep: it ends by `wake`, by a touch of the folder, or by time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.common import files as sleeper_module
from stepscope.common.files import WakeableSleep

LONG_S = 20.0
"""Longer than a test may take."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"before")
    return tmp_path


def test_wake_ends_the_sleep_also_when_it_came_before(folder: Path) -> None:
    sleeper = WakeableSleep(folder)
    sleeper.wake()
    assert sleeper.sleep(LONG_S)
    threading.Timer(0.05, sleeper.wake).start()
    began = time.monotonic()
    assert sleeper.sleep(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert not sleeper.sleep(0.0), "one wake ends one sleep"


def test_a_touch_of_the_folder_ends_the_sleep_until_it_is_forgotten(folder: Path) -> None:
    sleeper = WakeableSleep(folder)
    assert sleeper.sees_touches
    (folder / "file").write_bytes(b"after")
    (folder / "part").write_bytes(b"new")
    os.replace(folder / "part", folder / "file")
    assert not sleeper._poll.poll(0), "files of the folder may change"
    os.utime(folder)
    began = time.monotonic()
    assert not sleeper.sleep(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    sleeper.forget_touches()
    sleeper.forget_touches()
    began = time.monotonic()
    assert not sleeper.sleep(0.05)
    assert time.monotonic() - began >= 0.05


class NoInotify:
    """Stands for libc on a machine that has given out all its inotify instances."""

    def inotify_init1(self, flags: int) -> int:
        return -1


def test_without_inotify_it_says_so_and_wakes_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def libc(name: Any) -> NoInotify:
        return NoInotify()

    monkeypatch.setattr(sleeper_module.ctypes, "CDLL", libc)
    sleeper = WakeableSleep(folder)
    assert not sleeper.sees_touches
    sleeper.forget_touches()
    sleeper.wake()
    assert sleeper.sleep(LONG_S)


def test_its_files_are_closed_with_it(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sleeper = WakeableSleep(folder)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del sleeper
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_thread_gives_its_inotify_instance_back_without_garbage_collection(
    folder: Path,
) -> None:
    def instances() -> int:
        return sum("inotify" in os.path.realpath(one) for one in Path("/proc/self/fd").iterdir())

    before = instances()
    sleeper = WakeableSleep(folder)
    assert instances() == before + 1
    sleeper.close()
    assert instances() == before
    sleeper.close()
    sleeper.forget_touches()


def test_a_wake_without_its_file_raises_nothing(folder: Path) -> None:
    sleeper = WakeableSleep(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sleeper._event)
    sleeper.wake()
