"""The writer thread's sleep ends by `wake`, by a touch of the folder, or by time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.common import files as sleeper_module
from stepscope.common.files import WakeableSleep

LONG_S = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"before")
    return tmp_path


def open_files() -> list[str]:
    return [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]


def test_wake_ends_the_sleep_also_in_advance(folder: Path) -> None:
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


def test_without_inotify_wake_ends_the_sleep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = SimpleNamespace(inotify_init1=lambda _flags: -1)
    monkeypatch.setattr(sleeper_module.ctypes, "CDLL", lambda _name: libc)
    sleeper = WakeableSleep(folder)
    assert not sleeper.sees_touches
    sleeper.forget_touches()
    sleeper.wake()
    assert sleeper.sleep(LONG_S)


def test_its_files_are_closed_by_the_thread_and_with_the_object(folder: Path) -> None:
    before = len(open_files())
    sleeper = WakeableSleep(folder)
    assert len(open_files()) == before + 2
    for _ in range(2):
        sleeper.close()
        assert len(open_files()) == before + 1
        assert not any("inotify" in file for file in open_files())
    sleeper.forget_touches()
    del sleeper
    assert len(open_files()) == before
