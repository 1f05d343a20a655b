"""Resuming continues the same loss curve, bit for bit on a CPU, from any checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stepscope.run import RunStatus
from tests.integration.conftest import SaveAtStep
from tests.support.run_values import events, metric, run_json
from tests.support.training_runs import refused, small, train
from trainer.config import LRSchedule, Optimizer, RunConfig, Workload
from trainer.runners.training_run import run
from trainer.training.checkpoint import read_checkpoint
from trainer.workloads.build import WORKLOADS
from trainer.workloads.task import Task, TensorSplit

CONSTANT = {"optimizer": Optimizer.SGD, "lr_scheduler": LRSchedule.NONE}


@pytest.mark.parametrize(
    ("workload", "changes", "where"),
    [
        (Workload.DIGITS_CNN, {}, "mid-epoch"),
        *((Workload.DIGITS_MLP, CONSTANT, where) for where in ("mid-epoch", "epoch end")),
        (
            Workload.DIGITS_MLP,
            {"optimizer": Optimizer.ADAMW, "max_grad_norm": 1.0, "optimizer_impl": "for-loop"},
            "mid-epoch",
        ),
    ],
)
def test_a_resumed_run_continues_the_curve_bitwise(
    workload: Workload,
    changes: dict[str, Any],
    where: str,
    tmp_path: Path,
    saving_at_step: SaveAtStep,
) -> None:
    config = small(workload, epochs=3, batch_size=512, seed=3)
    config = replace(config, **changes)
    step = 26 + (7 if where == "mid-epoch" else 0)
    saving_at_step(step)
    whole = train(tmp_path, "whole", config)
    resumed = train(tmp_path, "resumed", replace(config, resume_from=f"whole/step-{step}.pt"))
    assert len(whole) == 3 * 26
    assert np.array_equal(resumed, whole[step:])
    rates = [metric(tmp_path / name, "train/lr") for name in ("resumed", "whole")]
    assert np.array_equal(rates[0], rates[1][step:])
    validated = metric(tmp_path / "resumed", "val/loss")
    assert np.array_equal(validated, metric(tmp_path / "whole", "val/loss")[-len(validated) :])
    run = run_json(tmp_path / "resumed")
    assert run["first_step"] == step
    assert run["total_steps"] == run["step"] == len(whole)
    assert events(tmp_path / "resumed")[0].kind == "resumed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 2}, "epochs"),
        ({"max_steps": 1}, "max_steps"),
        ({"workload": Workload.DIGITS_CNN}, "workload digits_mlp"),
        ({"optimizer": Optimizer.SGD}, "optimizer adam"),
        ({"lr_scheduler": LRSchedule.NONE}, "lr_scheduler cosine"),
        ({"resume_from": "first/step-9.pt"}, "step-9.pt"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_a_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = small(Workload.DIGITS_MLP, epochs=2)
    train(tmp_path, "first", config)
    again = replace(config, **{"epochs": 3, "resume_from": "first/last.pt", **changes})
    assert words in refused(tmp_path, "second", again)
    assert not (tmp_path / "second" / "traceback.txt").exists()


CONFIG = small(Workload.DIGITS_MLP, batch_size=512, epochs=3)  # 26 steps an epoch


@pytest.mark.parametrize(("steps", "validations"), [(7, 1), (26, 1), (33, 2)])
def test_a_run_ends_after_max_steps_with_a_validation(
    steps: int, validations: int, tmp_path: Path
) -> None:
    losses = train(tmp_path, "run", replace(CONFIG, max_steps=steps))
    told = run_json(tmp_path / "run")
    assert len(losses) == told["step"] == told["total_steps"] == steps
    assert told["steps_per_epoch"] == 26
    assert len(metric(tmp_path / "run", "val/loss")) == validations
    assert (tmp_path / "run" / "last.pt").is_file()
    last = [event for event in events(tmp_path / "run") if event.kind == "epoch"][-1]
    assert last.text.startswith("Epoch 1:" if steps == 26 else f"Step {steps}, the last:")


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
