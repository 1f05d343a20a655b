"""A model that acts otherwise in validation than in training, and draws random numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepscope.run import RunStatus
from tests.integration.conftest import SaveAtStep
from tests.support.run_values import metric
from tests.support.training_runs import small, train
from trainer.config import RunConfig, Workload
from trainer.training.checkpoint import read_checkpoint
from trainer.training.train import run
from trainer.workloads import WORKLOADS
from trainer.workloads.task import Task, TensorSplit

SAMPLES, BATCH = 96, 16
STEPS = SAMPLES // BATCH


class Model(nn.Module):
    """Notes in `modes` whether each forward pass was one of training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        )
        self.modes: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append(self.training)
        scores: Tensor = self.layers(inputs)
        return scores


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """The tasks made by runs of DIGITS_MLP, which all train `Model`."""
    made: list[Task] = []

    def task(config: RunConfig) -> Task:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn((2 * SAMPLES, 4), generator=generator)
        targets = torch.randint(0, 3, (2 * SAMPLES,), generator=generator)
        made.append(
            Task(
                model=Model(),
                train=TensorSplit.of(inputs[:SAMPLES], targets[:SAMPLES]),
                validation=TensorSplit.of(inputs[SAMPLES:] * 2 + 1, targets[SAMPLES:]),
                loss=nn.CrossEntropyLoss(),
            )
        )
        return made[-1]

    monkeypatch.setitem(WORKLOADS, Workload.DIGITS_MLP, task)
    return made


def config(epochs: int) -> RunConfig:
    return small(Workload.DIGITS_MLP, epochs=epochs, batch_size=BATCH, seed=4)


def test_validation_takes_the_model_as_it_will_be_used(tasks: list[Task], tmp_path: Path) -> None:
    assert run(config(2), tmp_path) is RunStatus.FINISHED
    epoch = [True] * STEPS + [False] * STEPS
    assert isinstance(tasks[0].model, Model)
    assert tasks[0].model.modes == epoch + epoch
    model, split = Model(), tasks[0].validation
    model.load_state_dict(read_checkpoint(tmp_path / "last.pt")["model"])
    model.eval()
    with torch.inference_mode():
        scores = model(split.inputs)
    expected = nn.functional.cross_entropy(scores, split.targets).item()
    assert metric(tmp_path, "val/loss")[-1] == pytest.approx(expected, rel=1e-5)
    hits = (scores.argmax(dim=1) == split.targets).float().mean().item()
    assert metric(tmp_path, "val/accuracy")[-1] == pytest.approx(100 * hits)


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("step", [STEPS, STEPS + 2], ids=["epoch end", "mid-epoch"])
def test_a_resumed_run_draws_the_same_random_numbers(
    step: int, tmp_path: Path, saving_at_step: SaveAtStep
) -> None:
    saving_at_step(step)
    whole = train(tmp_path, "whole", config(3))
    resumed = train(tmp_path, "resumed", replace(config(3), resume_from=f"whole/step-{step}.pt"))
    assert len(whole) == 3 * STEPS
    assert np.array_equal(resumed, whole[step:])
