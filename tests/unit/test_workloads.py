"""Workloads: shapes, splits, sizes, and that a few steps lower the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.sizes import SMALL
from tests.support.training_runs import losses_on_one_batch
from trainer.config import Workload, defaults
from trainer.workloads import WORKLOADS, digits, linear, memory_stress
from trainer.workloads.task import Task


def make(workload: Workload, **changes: Any) -> Task:
    torch.manual_seed(0)
    return WORKLOADS[workload](replace(defaults(workload), **(SMALL[workload] | changes)))


@pytest.mark.parametrize("workload", list(SMALL))
def test_a_few_steps_on_one_batch_lower_the_loss(workload: Workload) -> None:
    config = replace(defaults(workload), learning_rate=0.01)
    losses = losses_on_one_batch(make(workload), config, 32)
    assert losses[-1] < 0.8 * losses[0]


def test_validation_digits_are_unseen() -> None:
    task = make(Workload.DIGITS_CNN)
    assert task.train.inputs.shape == (9 * 1438, 1, 8, 8)
    assert task.validation.inputs.shape == (digits.HELD_OUT, 1, 8, 8)
    unshifted = task.train.inputs[4 * 1438 : 5 * 1438]
    seen = {image.numpy().tobytes() for image in unshifted}
    # The data set itself holds a few identical images.
    twins = sum(image.numpy().tobytes() in seen for image in task.validation.inputs)
    assert twins <= 3
    assert len(seen) > 1400


def test_the_line_is_drawn_against_the_truth() -> None:
    task = make(Workload.LINEAR)
    fit = task.run_info["fit"]
    assert len(fit["x"]) == len(fit["y"]) == linear.PICTURED
    residual = torch.tensor(fit["y"]) - fit["slope"] * torch.tensor(fit["x"]) - fit["intercept"]
    assert residual.std().item() == pytest.approx(linear.NOISE, rel=0.2)
    assert set(task.recorded) == {"model/weight", "model/bias"}


@pytest.mark.parametrize("size", [8, 32, 224, 1024])
def test_the_fill_pool_stays_small_at_any_size(size: int) -> None:
    task = make(Workload.MEMORY_STRESS, image_size=size)
    assert task.train.inputs.nbytes <= memory_stress.POOL_BYTES
    assert task.run_info["synthetic"] is True
    assert task.train.length >= memory_stress.EPOCH_SAMPLES


def test_fill_makes_an_epoch_of_large_batches() -> None:
    assert make(Workload.MEMORY_STRESS, batch_size=4096).train.length == 32 * 4096
