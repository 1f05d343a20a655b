"""What goes wrong on a GPU: told apart, explained, and the process left as it can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.compute import CudaCompute
from trainer.config import Optimizer, Precision, RunConfig, Workload, defaults
from trainer.devices import list_devices
from trainer.precision import autocast
from trainer.problems import TrainDevice
from trainer.step import TrainStep
from trainer.training import Training
from trainer.workloads import WORKLOADS

HUGE_SCALE = 2.0**40
"""A loss scale with which the first steps of fp16 overflow and are skipped."""
STEPS = 40
"""Enough to halve the scale until steps count, and for some more."""
STALE = 1e3
"""What freed memory is filled with, so that a buffer which nobody sets is seen."""


@pytest.fixture
def gpu() -> TrainDevice:
    return next(d for d in list_devices() if d.cuda_index is not None and d.reason is None)


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_a_skipped_first_step_leaves_no_trace_in_the_optimizer(
    gpu: TrainDevice, optimizer: Optimizer
) -> None:
    """A fused kernel learns of the overflow on the GPU and returns before it has set anything."""
    base = replace(
        defaults(Workload.DIGITS_MLP, gpu.id), precision=Precision.FP16, optimizer=optimizer
    )
    fused, plain = (_trained(gpu, replace(base, fused=fused)) for fused in (True, False))
    assert fused.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, msg=lambda text, at=name: f"{at}: {text}")


def _trained(gpu: TrainDevice, config: RunConfig) -> dict[str, Tensor]:
    """Train until some steps have counted; return weights and optimizer state by name."""
    assert gpu.cuda_index is not None
    compute = CudaCompute(gpu.cuda_index)
    torch.manual_seed(config.seed)
    task = WORKLOADS[config.workload](config)
    stale = [torch.full_like(p, STALE, device="cuda") for p in task.model.parameters()]
    training = Training(config, task.model.to(compute.device), compute)
    scaler = torch.amp.GradScaler("cuda", init_scale=HUGE_SCALE)
    step = TrainStep(
        model=training.model,
        loss=task.loss,
        optimizer=training.optimizer,
        scaler=scaler,
        autocast=autocast(config.precision, compute.device),
        clip_norm=0.0,
    )
    del stale
    batch = [part[:64].to(compute.device) for part in (task.train.inputs, task.train.targets)]
    step(*batch)
    assert scaler.get_scale() < HUGE_SCALE, "the first step was to overflow"
    for _ in range(STEPS):
        step(*batch)
    assert int(scaler._growth_tracker) > 0, "the last step was to count"  # type: ignore[arg-type]
    return {**training.model.state_dict(), **_states(training)}


def _states(training: Training) -> dict[str, Any]:
    states = training.optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value).cpu().float()
        for number, state in states.items()
        for name, value in state.items()
    }
