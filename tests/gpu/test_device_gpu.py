"""What only a real GPU can refute: late copies, arithmetic, lasting errors, what a look costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepscope.gpu.source import open_source
from tests.conftest import Need
from tests.support.child_process import run_python
from trainer.config import Precision, RunConfig, Workload, defaults
from trainer.training.config_validation import TrainDevice, choice_problem
from trainer.training.precision import run_flags

MIB = 2**20


def small(gpu: TrainDevice, **changes: Any) -> RunConfig:
    return replace(defaults(Workload.DIGITS_CNN, gpu.id), epochs=2, **changes)


def child(program: str, *args: str) -> str:
    """Run a program in a process of its own, where CUDA has not been touched; return its output."""
    done = run_python("-c", program, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("operation", ["matmul", "convolution"])
def test_fp32_is_exact_and_tf32_is_not(gpu: TrainDevice, operation: str) -> None:
    for precision, exact in ((Precision.FP32, True), (Precision.TF32, False)):
        if problem := choice_problem("precision", precision, small(gpu), [gpu]):
            pytest.skip(str(problem))
        with run_flags(RunConfig(precision=precision)):
            error = relative_error(operation, torch.device("cuda", gpu.cuda_index))
        assert (error < 1e-5) == exact, (precision, error)


def relative_error(operation: str, device: torch.device) -> float:
    """The error of one operation in float32 against float64."""
    generator = torch.Generator().manual_seed(0)
    if operation == "matmul":
        a, b = (torch.randn(512, 512, generator=generator).to(device) for _ in range(2))
        got, true = a @ b, a.double() @ b.double()
    else:
        a = torch.randn(32, 64, 32, 32, generator=generator).to(device)
        b = torch.randn(64, 64, 3, 3, generator=generator).to(device)
        got, true = torch.conv2d(a, b), torch.conv2d(a.double(), b.double())
    return float((got - true).norm() / true.norm())


LOOK = """
import pynvml, sys
from trainer.training.devices import list_devices
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
before = used()
[found] = [device for device in list_devices() if device.id == sys.argv[1]]
listed = used()
import torch
torch.zeros(1, device=f"cuda:{found.cuda_index}")
torch.cuda.synchronize(found.cuda_index)
print(listed - before, used() - before)
"""


def test_listing_devices_takes_no_gpu_memory(gpu: TrainDevice, need: Need) -> None:
    """The page lists them in the server's process; a context there would cost some 500 MiB."""
    need(open_source().reason)
    listed, context = map(int, child(LOOK, gpu.id).split())
    assert listed < 16 * MIB
    assert context > 64 * MIB, "a context must show in this measure, or the test proves nothing"
