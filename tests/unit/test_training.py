"""The state of a run: which kernel an optimizer takes, and a schedule stretched by a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer.config import Optimizer, RunConfig, Schedule
from trainer.training.compute import CpuCompute
from trainer.training.state import Training


def training(**changes: object) -> Training:
    config = RunConfig(**{"epochs": 3, "schedule": Schedule.COSINE, **changes})  # type: ignore[arg-type]
    return Training(config, nn.Linear(2, 1), CpuCompute())


def one_epoch(run: Training) -> None:
    run.model(torch.ones(1, 2)).sum().backward()
    run.optimizer.step()
    run.next_epoch(0.0)


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_without_fused_torch_chooses_the_kernel(optimizer: Optimizer) -> None:
    """False would be its slowest, a loop over single tensors, on a GPU as well."""
    assert training(optimizer=optimizer, fused=False).optimizer.defaults["fused"] is None
    assert training(optimizer=optimizer, fused=True).optimizer.defaults["fused"] is True


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("fused", [True, False])
def test_a_resumed_run_takes_its_own_kernel(optimizer: Optimizer, fused: bool) -> None:
    """Else fp16's scaler hands its scale to a kernel that refuses it."""
    first = training(optimizer=optimizer, fused=not fused)
    one_epoch(first)
    second = training(optimizer=optimizer, fused=fused)
    second.load(copy.deepcopy(first.state_dict()))
    assert second.optimizer.param_groups[0]["fused"] is (True if fused else None)
    one_epoch(second)


def test_a_cosine_goes_on_over_more_epochs_as_if_it_had_known() -> None:
    first, whole, resumed = training(), training(epochs=6), training(epochs=6)
    for run in (first, whole):
        for _ in range(3):
            one_epoch(run)
    assert first.learning_rate == pytest.approx(0, abs=1e-9)
    resumed.load(copy.deepcopy(first.state_dict()))
    for _ in range(3):
        assert resumed.learning_rate == pytest.approx(whole.learning_rate)
        assert resumed.learning_rate > 1e-5
        one_epoch(whole)
        one_epoch(resumed)
    assert resumed.learning_rate == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_changed_learning_rate_counts_where_the_schedule_stands(schedule: Schedule) -> None:
    first = training(schedule=schedule, learning_rate=0.1)
    whole = training(schedule=schedule, learning_rate=0.02)
    resumed = training(schedule=schedule, learning_rate=0.02, epochs=5)
    for run in (first, whole):
        one_epoch(run)
    state = copy.deepcopy(first.state_dict())
    resumed.load(state)
    if schedule is not Schedule.COSINE:  # a cosine over more epochs stands higher
        assert resumed.learning_rate == pytest.approx(whole.learning_rate)
    one_epoch(resumed)
    longer = training(schedule=schedule, learning_rate=0.02, epochs=5)
    for _ in range(2):
        one_epoch(longer)
    assert resumed.learning_rate == pytest.approx(longer.learning_rate)
    taken, changed = resumed.from_checkpoint(state)
    assert changed == {"epochs": [3, 5], "learning_rate": [0.1, 0.02]}
    assert not any("learning rate" in words for words in taken)


def test_what_comes_from_the_checkpoint_is_named() -> None:
    first, resumed = training(seed=1), training(seed=2)
    one_epoch(first)
    state = copy.deepcopy(first.state_dict())
    resumed.load(state)
    taken, changed = resumed.from_checkpoint(state)
    assert taken == [
        "weights",
        "state of adam",
        "place in the cosine schedule",
        f"learning rate {first.learning_rate:.4g}",
        "random numbers",
        "order of the samples",
    ]
    assert changed == {"seed": [1, 2]}
