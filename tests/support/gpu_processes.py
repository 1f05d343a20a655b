"""Processes that a test starts: none outlives it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest
import torch

from tests.support.child_process import is_running, processes_with

MARK = "STEPSCOPE_TESTED_BY"
"""Environment variable with the number of this process, which all that it starts inherit."""
ENDS_S = 20.0
"""Longest time until a process that was ended is gone: a busy machine takes seconds for 1 GiB."""

os.environ[MARK] = str(os.getpid())


def started() -> set[int]:
    """Return the processes that this one has started, directly or not, and that still run.

    Those of multiprocessing that serve all tests are left out.
    """
    found = {process.pid for process in psutil.Process().children()}
    found |= processes_with(f"{MARK}={os.getpid()}\0")
    lasting = {
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }
    return {pid for pid in found - lasting if is_running(pid)}


@contextmanager
def none_left() -> Iterator[None]:
    """Fail where a process that the block starts outlives it; end that process."""
    before = started()
    yield
    until = time.monotonic() + ENDS_S
    while left := started() - before:
        if time.monotonic() > until:
            commands = []
            for pid in left:
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    commands.append(process.cmdline())
                    process.kill()
            pytest.fail(f"processes left running: {commands}")
        time.sleep(0.05)


def release() -> None:
    """Give back the memory that torch keeps in this process: another one may need the GPU."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves a process behind."""
    with none_left():
        yield
