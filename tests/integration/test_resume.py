"""Resuming continues the same loss curve, bit for bit on a CPU, from any checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.run import RunStatus
from tests.integration.conftest import SaveAtStep
from tests.support.run_values import events, metric, run_json
from tests.support.training_runs import small, train
from trainer.config import LRSchedule, Optimizer, Workload
from trainer.training.checkpoint import read_checkpoint
from trainer.training.train import run

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("workload", "changes"),
    [
        (Workload.DIGITS_CNN, {}),
        (Workload.DIGITS_MLP, {"optimizer": Optimizer.SGD, "lr_scheduler": LRSchedule.PLATEAU}),
        (
            Workload.DIGITS_MLP,
            {"optimizer": Optimizer.ADAMW, "max_grad_norm": 1.0, "optimizer_impl": "for-loop"},
        ),
        (Workload.MEMORY_STRESS, {"batch_size": 64}),
    ],
)
@pytest.mark.parametrize("where", ["mid-epoch", "epoch end"])
def test_a_resumed_run_continues_the_curve_bitwise(
    workload: Workload,
    changes: dict[str, Any],
    where: str,
    tmp_path: Path,
    saving_at_step: SaveAtStep,
) -> None:
    config = small(workload, epochs=3, batch_size=512, seed=3)
    config = replace(config, **changes)
    steps_per_epoch = 32 if workload is Workload.MEMORY_STRESS else 26
    step = steps_per_epoch + (7 if where == "mid-epoch" else 0)
    saving_at_step(step)
    whole = train(tmp_path, "whole", config)
    resumed = train(tmp_path, "resumed", replace(config, resume_from=f"whole/step-{step}.pt"))
    assert len(whole) == 3 * steps_per_epoch
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
        ({"epochs": 2}, ". Increase epochs; it counts from the first run's start."),
        ({"workload": Workload.DIGITS_CNN}, "made with workload digits_mlp"),
        ({"optimizer": Optimizer.SGD}, "made with optimizer adam"),
        ({"lr_scheduler": LRSchedule.NONE}, "made with lr_scheduler cosine"),
        ({"resume_from": "first/step-9.pt"}, "cannot be read"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_a_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = small(Workload.DIGITS_MLP, epochs=2)
    train(tmp_path, "first", config)
    (tmp_path / "second").mkdir()
    again = replace(config, **{"epochs": 3, "resume_from": "first/last.pt", **changes})
    assert run(again, tmp_path / "second") is RunStatus.FAILED
    assert words in run_json(tmp_path / "second")["reason"]
    assert not (tmp_path / "second" / "traceback.txt").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 2}, "made with num_layers 1, got 2. Set num_layers to 1."),
        ({"context_length": 32}, "made with context_length 16, got 32"),
        ({"tie_embeddings": False}, "made with tie_embeddings True, got False"),
    ],
)
def test_another_size_of_a_gpt_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = small(Workload.GPT, max_steps=3)
    train(tmp_path, "first", config)
    (tmp_path / "second").mkdir()
    again = replace(config, **{"max_steps": 5, "resume_from": "first/last.pt", **changes})
    assert run(again, tmp_path / "second") is RunStatus.FAILED
    assert words in run_json(tmp_path / "second")["reason"]


def test_the_page_is_told_what_came_from_the_checkpoint(tmp_path: Path) -> None:
    config = small(Workload.DIGITS_MLP, epochs=2, lr_scheduler=LRSchedule.NONE)
    train(tmp_path, "first", config)
    again = replace(config, epochs=3, learning_rate=1e-3, resume_from="first/last.pt")
    train(tmp_path, "second", again)
    assert metric(tmp_path / "second", "train/lr")[0] == pytest.approx(1e-3)
    text = events(tmp_path / "second")[0].text
    assert "with its weights, state of adam, random numbers" in text
    assert "changed since: epochs 3 (was 2), learning_rate 0.001 (was 0.0005)" in text
    fact = run_json(tmp_path / "second")["resumed"]
    assert fact["checkpoint"] == "first/last.pt"
    assert fact["changed"]["learning_rate"] == [5e-4, 1e-3]


def test_best_pt_holds_the_lowest_validation_loss(tmp_path: Path) -> None:
    config = small(Workload.DIGITS_MLP, epochs=4)
    train(tmp_path, "run", config)
    best = read_checkpoint(tmp_path / "run" / "best.pt")["best_loss"]
    assert best == pytest.approx(metric(tmp_path / "run", "val/loss").min())
