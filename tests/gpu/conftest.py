"""These tests need CUDA: without it they skip with the reason, or fail under --require-gpu."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest
import torch

from tests.conftest import Need
from tests.support.child_process import is_running, processes_with
from trainer.training.accelerator import CudaAccelerator
from trainer.training.config_validation import TrainDevice
from trainer.training.devices import cuda_reason, list_devices

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


SIMULATED = importlib.util.find_spec("cudasim") is not None
"""The GPU is simulated (simulator/): it can be broken, doubled and asked what it was told."""

simulator_only = pytest.mark.skipif(
    not SIMULATED, reason="on the simulator only: breaks the device for good, or counts its calls"
)
"""A test that no GPU can run; it skips there, also under --require-gpu."""


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Let torch raise at every call that waits for the device."""
    try:
        with warnings.catch_warnings():  # once a process it says that this mode is a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def two_devices(need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a test starts find two GPUs; this one may have one."""
    if SIMULATED:
        monkeypatch.setenv("CUDASIM_DEVICES", "2")
    else:
        need(None if torch.cuda.device_count() > 1 else "needs two GPUs")


@pytest.fixture(scope="module")
def gpu() -> TrainDevice:
    """Return the first GPU that torch can train on."""
    return next(d for d in list_devices() if d.cuda_index is not None and d.reason is None)


@pytest.fixture
def compute(gpu: TrainDevice) -> CudaAccelerator:
    assert gpu.cuda_index is not None
    return CudaAccelerator(gpu.cuda_index)


@pytest.fixture(autouse=True, scope="module")  # before the fixtures of a module, which use the GPU
def _cuda(need: Need) -> Iterator[None]:
    """Begin each module without what tests before it have left in torch's cache.

    To a process under test this one is another process, and what it has cached does not fit.
    """
    need(cuda_reason())
    release()
    with none_left():
        yield
