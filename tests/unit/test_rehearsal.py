"""Warm-up steps change nothing: weights, statistics, optimizer, loss scale, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import Optimizer, OptimizerImpl, RunConfig
from trainer.train import TrainStep, build_train_step
from trainer.training.accelerator import CpuAccelerator
from trainer.training.state import TrainState
from trainer.training.warmup import (
    preserve_train_state,
    run_optimizer_step,
)
from trainer.workloads.task import Task, TensorSplit

BATCH = torch.rand(8, 4), torch.rand(8, 2)


def make(**changes: Any) -> tuple[TrainState, TrainStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    config = RunConfig(**{"learning_rate": 0.01, "max_grad_norm": 1.0, **changes})
    training = TrainState(config, model, CpuAccelerator())
    training.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    split = TensorSplit.of(*BATCH)
    task = Task(model=model, train=split, validation=split, loss=nn.MSELoss())
    return training, build_train_step(training, task)


def losses(step: TrainStep, steps: int) -> list[float]:
    return [step(*BATCH)[0].item() for _ in range(steps)]


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("optimizer_impl", list(OptimizerImpl))
@pytest.mark.parametrize("done", [0, 3])
def test_losses_are_bitwise_those_without_warm_up(
    optimizer: Optimizer, optimizer_impl: OptimizerImpl, done: int
) -> None:
    """At a run's beginning and, as after a resume, when the optimizer has state."""
    _, plain = make(optimizer=optimizer, optimizer_impl=optimizer_impl)
    expected = losses(plain, done + 4)
    training, step = make(optimizer=optimizer, optimizer_impl=optimizer_impl)
    assert losses(step, done) == expected[:done]
    with preserve_train_state(training):
        for _ in range(3):
            run_optimizer_step(step, BATCH, 2)
        assert training.scaler.get_scale() > 4.0
    assert losses(step, 4) == expected[done:]


def test_weights_are_put_back_in_place() -> None:
    training, step = make()
    places = [tensor.data_ptr() for tensor in training.model.state_dict().values()]
    with preserve_train_state(training):
        losses(step, 5)
    assert [tensor.data_ptr() for tensor in training.model.state_dict().values()] == places
