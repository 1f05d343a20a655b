"""What goes wrong on a GPU: told apart, explained, and the process left as it can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.child_process import run_python
from tests.support.run_values import metric, run_json
from tests.support.training_runs import train as finished
from trainer.config import Optimizer, Precision, RunConfig, Workload, defaults
from trainer.train import build_train_step
from trainer.training.accelerator import CudaAccelerator
from trainer.training.config_validation import TrainDevice
from trainer.training.state import TrainState
from trainer.workloads.build import WORKLOADS

MIB = 2**20
HUGE_SCALE = 2.0**40
"""A loss scale with which the first steps of fp16 overflow and are skipped."""
STEPS = 40
"""Enough to halve the scale until steps count, and for some more."""
STALE = 1e3
"""What freed memory is filled with, so that a buffer which nobody sets is seen."""


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_a_skipped_first_step_leaves_no_trace_in_the_optimizer(
    gpu: TrainDevice, optimizer: Optimizer
) -> None:
    """A fused kernel learns of the overflow on the GPU and returns before it has set anything."""
    base = replace(
        defaults(Workload.DIGITS_MLP, gpu.id), precision=Precision.FP16, optimizer=optimizer
    )
    fused, plain = (
        _trained(gpu, replace(base, optimizer_impl=impl)) for impl in ("fused", "for-loop")
    )
    assert fused.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(
            fused[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, at=name: f"{at}: {text}"
        )  # on an H100 the kernels differ by 1.5e-5


def _trained(gpu: TrainDevice, config: RunConfig) -> dict[str, Tensor]:
    """Train until some steps have counted; return weights and optimizer state by name."""
    assert gpu.cuda_index is not None
    compute = CudaAccelerator(gpu.cuda_index)
    torch.manual_seed(config.seed)
    task = WORKLOADS[config.workload](config)
    stale = [torch.full_like(p, STALE, device="cuda") for p in task.model.parameters()]
    training = TrainState(config, task.model.to(compute.device), compute)
    scaler = torch.amp.GradScaler("cuda", init_scale=HUGE_SCALE)
    step = replace(build_train_step(training, task), scaler=scaler)
    del stale
    batch = [part[:64].to(compute.device) for part in (task.train.inputs, task.train.targets)]
    step(*batch)
    assert scaler.get_scale() < HUGE_SCALE, "the first step was to overflow"
    for _ in range(STEPS):
        step(*batch)
    assert int(scaler._growth_tracker) > 0, "the last step was to count"  # type: ignore[arg-type]
    return {**training.model.state_dict(), **_states(training)}


def _states(training: TrainState) -> dict[str, Any]:
    states = training.optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value).cpu().float()
        for number, state in states.items()
        for name, value in state.items()
    }


def small(gpu: TrainDevice, workload: Workload, **changes: Any) -> RunConfig:
    return replace(defaults(workload, gpu.id), epochs=2, **changes)


def test_the_peaks_are_the_runs_own(gpu: TrainDevice, tmp_path: Path) -> None:
    former = torch.empty(512 * MIB, dtype=torch.uint8, device=f"cuda:{gpu.cuda_index}")
    del former
    torch.cuda.empty_cache()
    finished(tmp_path, "run", small(gpu, Workload.LINEAR))
    for key in ("memory/peak_allocated", "memory/peak_reserved"):
        assert metric(tmp_path / "run", key, "samples").max() < 512 * MIB, key


LOST_GPU = """
import itertools, os, sys, threading
from dataclasses import replace
from pathlib import Path
import torch
from trainer.runners import training_run
from trainer.config import RunConfig
from trainer.train import TrainStep

config = RunConfig.from_dict(eval(sys.argv[1]))
folder = Path(sys.argv[2])
train, steps = TrainStep.__call__, itertools.count(1)

def step(self, inputs, targets, *rest):
    loss = train(self, inputs, targets, *rest)
    if next(steps) == 5:  # a class that is not there: the kernel asserts, some time later
        torch.nn.functional.nll_loss(torch.zeros(4, 2, device=inputs.device), targets[:4] + 100)
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # in a library's own words
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED") from None
    return loss

TrainStep.__call__ = step
for name in ("lost", "next"):
    (folder / name).mkdir()
    thread = threading.Thread(target=training_run.run, args=(config, folder / name))
    thread.start()
    thread.join()
print("the page lives", flush=True)
os._exit(0)  # at its end torch itself may abort
"""


def test_a_lost_gpu_ends_the_run_and_not_the_page(gpu: TrainDevice, tmp_path: Path) -> None:
    config = small(gpu, Workload.DIGITS_MLP)
    done = run_python("-c", LOST_GPU, repr(config.to_dict()), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "the page lives" in done.stdout
    for name in ("lost", "next"):
        reason = str(run_json(tmp_path / name)["reason"])
        assert reason.startswith("The GPU failed: CUDA error: device-side assert"), reason
        assert "Restart the server" in reason
    assert (tmp_path / "lost" / "traceback.txt").is_file()
