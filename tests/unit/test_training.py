"""The state of a run: the kernel of its optimizer, its learning rate at each step, resuming."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import (
    LRSchedule,
    Optimizer,
    OptimizerImpl,
    RunConfig,
)
from trainer.training.accelerator import CpuAccelerator
from trainer.training.state import TrainState


def training(samples: int = 1, **changes: object) -> TrainState:
    config = RunConfig(**{"epochs": 3, "lr_scheduler": LRSchedule.COSINE, **changes})  # type: ignore[arg-type]
    return TrainState(config, nn.Linear(2, 1), CpuAccelerator(), samples=samples)


def one_step(run: TrainState) -> float:
    """Take a step and return its learning rate."""
    rate = run.learning_rate
    run.model(torch.ones(1, 2)).sum().backward()
    run.optimizer.step()
    run.count(1, min(run.config.step_size, run.samples - run.offset))
    if run.offset == run.samples:
        run.next_epoch()
    return rate


def one_epoch(run: TrainState) -> None:
    epoch = run.epoch
    while run.epoch == epoch:
        one_step(run)


KERNELS = {
    OptimizerImpl.FUSED: "fused",
    OptimizerImpl.FOREACH: "multi_tensor",
    OptimizerImpl.FOR_LOOP: "single_tensor",
}


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("impl", KERNELS)
def test_the_setting_chooses_the_kernel_of_the_optimizer_also_of_a_resumed_run(
    optimizer: Optimizer, impl: OptimizerImpl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted is which of torch's functions is called; fp16's scaler raises for another one."""
    name = "sgd" if optimizer is Optimizer.SGD else "adam"
    module = importlib.import_module(f"torch.optim.{name}")
    called: list[str] = []

    def count(kind: str, real: Any, *args: Any, **options: Any) -> None:
        called.append(kind)
        real(*args, **options)

    for kind in KERNELS.values():
        real = getattr(module, f"_{kind}_{name}")
        monkeypatch.setattr(module, f"_{kind}_{name}", partial(count, kind, real))
    other = OptimizerImpl.FOR_LOOP if impl == "fused" else OptimizerImpl.FUSED
    first = training(optimizer=optimizer, optimizer_impl=other)
    one_epoch(first)
    second = training(optimizer=optimizer, optimizer_impl=impl)
    second.load(copy.deepcopy(first.state_dict()))
    one_epoch(second)
    # Loading takes a step with gradients of 0 first.
    assert (called[0], set(called[1:])) == (KERNELS[other], {KERNELS[impl]})


HALF_ROOT = 0.5**0.5
FALLING = [1.0, (1 + HALF_ROOT) / 2, 0.5, (1 - HALF_ROOT) / 2]
"""A cosine over four steps: (1 + cos(π n / 4)) / 2."""


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({"epochs": 1, "batch_size": 1, "gradient_accumulation_steps": 3}, FALLING),
        ({"epochs": 50, "batch_size": 4, "max_steps": 4}, FALLING),
        ({"epochs": 2, "batch_size": 4, "lr_warmup_steps": 2}, [1 / 3, 2 / 3, *FALLING]),
        (
            {"batch_size": 10, "lr_scheduler": LRSchedule.NONE, "lr_warmup_steps": 1},
            [1 / 2, 1.0, 1.0],
        ),
    ],
)
def test_the_rate_of_each_step_is_that_of_the_formula(
    changes: dict[str, Any], factors: list[float]
) -> None:
    run = training(samples=10, learning_rate=0.2, **changes)
    assert run.total_steps == len(factors)
    assert [one_step(run) for _ in factors] == pytest.approx([0.2 * one for one in factors])
    assert run.has_ended
    if run.config.lr_scheduler is LRSchedule.COSINE:
        assert run.learning_rate == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_resumed_run_has_the_rates_of_the_whole_one(step: int) -> None:
    settings: dict[str, Any] = {"samples": 10, "batch_size": 4, "lr_warmup_steps": 3}
    whole, first, resumed = (training(**settings) for _ in range(3))
    rates = [one_step(whole) for _ in range(9)]
    for _ in range(step):
        one_step(first)
    resumed.load(copy.deepcopy(first.state_dict()))
    assert [one_step(resumed) for _ in range(9 - step)] == rates[step:]
    assert resumed.has_ended


@pytest.mark.parametrize("schedule", list(LRSchedule))
def test_a_changed_learning_rate_counts_where_the_schedule_stands(schedule: LRSchedule) -> None:
    first = training(lr_scheduler=schedule, learning_rate=0.1)
    changed = {"lr_scheduler": schedule, "learning_rate": 0.02, "epochs": 5}
    whole, resumed = training(**changed), training(**changed)
    one_epoch(first)
    one_epoch(whole)
    resumed.load(copy.deepcopy(first.state_dict()))
    assert resumed.learning_rate == pytest.approx(whole.learning_rate)
    one_epoch(whole)
    one_epoch(resumed)
    assert resumed.learning_rate == pytest.approx(whole.learning_rate)


def test_eps_of_a_resumed_run_is_that_of_its_precision() -> None:
    first = training(precision="fp32")
    one_step(first)
    resumed = training(precision="pure_fp16")
    resumed.load(copy.deepcopy(first.state_dict()))
    assert resumed.optimizer.param_groups[0]["eps"] == 1e-3
    again = training(precision="fp32")
    again.load(copy.deepcopy(resumed.state_dict()))
    assert again.optimizer.param_groups[0]["eps"] == 1e-8
