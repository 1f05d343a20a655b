"""These tests need CUDA: without it they skip with the reason, or fail under --require-gpu."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.conftest import Need
from tests.support.gpu_processes import no_process_left, none_left, release
from trainer.training.accelerator import CudaAccelerator
from trainer.training.config_validation import TrainDevice
from trainer.training.devices import cuda_reason, list_devices

__all__ = ["no_process_left"]  # found here by pytest

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
