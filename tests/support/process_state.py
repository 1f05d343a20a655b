"""pytest plugin: fails a test that leaves state of the process or a thread behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

LIBRARY_THREADS = re.compile(
    r"AnyIO worker thread|asyncio_\d+|tqdm_monitor|ThreadPoolExecutor-\d+_\d+"
)
"""Names of threads that a library keeps for its next caller."""
LIBRARY_VARIABLES = re.compile(
    "PYTEST_CURRENT_TEST|_?TORCHINDUCTOR_.*|TRITON_.*|KMP_.*|PYTORCH_NVML_BASED_CUDA_CHECK"
)
"""Variables that pytest changes, and that torch's compiler, scikit-learn and Lightning set."""
LIBRARY_SIGNALS = {signal.SIGALRM, signal.SIGCHLD}
"""pytest-timeout takes its handler back after a failure, and torch's DataLoader keeps one."""
MAX_WAIT_S = 5.0


class Part(NamedTuple):
    """State that all tests of a process share."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not LIBRARY_VARIABLES.fullmatch(name)
    }


def _restore_environment(variables: dict[str, str]) -> None:
    for name in _environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _search_path() -> list[str]:
    """Return sys.path without the folder that setuptools adds for its own imports."""
    return [folder for folder in sys.path if not folder.endswith("setuptools/_vendor")]


def _handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in set(signal.Signals) - LIBRARY_SIGNALS}


def _restore_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


PARTS = {
    "os.environ": Part(_environment, _restore_environment),
    "sys.path": Part(_search_path, lambda path: sys.path.__setitem__(slice(None), path)),
    "working folder": Part(os.getcwd, os.chdir),
    "signal handlers": Part(_handlers, _restore_handlers),
}


def _difference(before: Any, after: Any) -> str:
    if not isinstance(before, dict):
        return f"{before!r} became {after!r}"
    return ", ".join(
        f"{key} {before.get(key)!r} became {after.get(key)!r}"
        for key in before | after
        if before.get(key) != after.get(key)
    )


@pytest.fixture(autouse=True)
def no_state_left() -> Iterator[None]:
    """Fail a test that changes the process for the tests after it, and undo the change."""
    before = {name: part.read() for name, part in PARTS.items()}
    yield
    left = []
    for name, part in PARTS.items():
        after = part.read()
        if after != before[name]:
            left.append(f"{name}: {_difference(before[name], after)}")
            part.restore(before[name])
    if left:
        pytest.fail("state left in the process:\n" + "\n".join(left))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread behind, of ours or of the test."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + MAX_WAIT_S
    while left := [one.name for one in _new_threads(before)]:
        if time.monotonic() > deadline:
            pytest.fail(f"threads left running: {left}")
        time.sleep(0.01)


def _new_threads(before: set[threading.Thread]) -> Iterator[threading.Thread]:
    for thread in set(threading.enumerate()) - before:
        if not LIBRARY_THREADS.fullmatch(thread.name):
            yield thread
