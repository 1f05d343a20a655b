"""Resuming continues the same loss curve, bit for bit on a CPU, from any checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.run_values import events, metric, run_json
from tests.support.training_runs import refused, save_at_step, small, train
from trainer.config import LRSchedule, Optimizer, Workload
from trainer.training.checkpoint import read_checkpoint
from trainer.workloads.build import build_task

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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small(workload, epochs=3, batch_size=512, seed=3)
    config = replace(config, **changes)
    step = 26 + (7 if where == "mid-epoch" else 0)
    save_at_step(monkeypatch, step)
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


DROPOUT = small(Workload.GPT, epochs=3, dropout=0.5, seed=4)


def test_validation_takes_the_model_without_dropout(tmp_path: Path) -> None:
    train(tmp_path, "run", replace(DROPOUT, epochs=1))
    task = build_task(DROPOUT)
    task.model.load_state_dict(read_checkpoint(tmp_path / "run" / "last.pt")["model"])
    task.model.eval()
    inputs, targets = task.validation.take(torch.arange(task.validation.length))
    with torch.inference_mode():
        scores = task.model(inputs)
    recorded = metric(tmp_path / "run", "val/loss")[-1]
    assert recorded == pytest.approx(task.loss(scores, targets).item(), rel=1e-5)


@pytest.mark.parametrize("further", [0, 2], ids=["epoch end", "mid-epoch"])
def test_a_resumed_run_draws_the_same_random_numbers(
    further: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a validation dropout is on again, as in a process that has not validated."""
    steps = -(-build_task(DROPOUT).train.length // DROPOUT.batch_size)
    step = steps + further
    save_at_step(monkeypatch, step)
    whole = train(tmp_path, "whole", DROPOUT)
    resumed = train(tmp_path, "resumed", replace(DROPOUT, resume_from=f"whole/step-{step}.pt"))
    assert len(whole) == 3 * steps
    assert np.array_equal(resumed, whole[step:])
