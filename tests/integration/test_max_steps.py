"""max_steps ends a run after so many optimizer steps, within an epoch or at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepscope.run import RunStatus
from tests.support.run_values import events, metric, run_json
from tests.support.training_runs import small, train
from trainer.config import LRSchedule, Workload
from trainer.training.train import run

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


@pytest.mark.parametrize("steps", [7, 26, 33])
def test_a_resumed_run_goes_on_bitwise_where_max_steps_ended_one(
    steps: int, tmp_path: Path
) -> None:
    constant = replace(CONFIG, lr_scheduler=LRSchedule.NONE)  # a cosine ends with max_steps
    whole = train(tmp_path, "whole", constant)
    first = train(tmp_path, "first", replace(constant, max_steps=steps))
    rest = train(tmp_path, "rest", replace(constant, resume_from="first/last.pt"))
    assert np.array_equal(np.concatenate([first, rest]), whole)
    assert run_json(tmp_path / "rest")["total_steps"] == len(whole)


def test_a_checkpoint_with_all_the_steps_behind_it_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "first", replace(CONFIG, max_steps=7))
    (tmp_path / "second").mkdir()
    again = replace(CONFIG, max_steps=7, resume_from="first/last.pt")
    assert run(again, tmp_path / "second") is RunStatus.FAILED
    assert (
        ". Increase max_steps; it counts from the first run's start."
        in run_json(tmp_path / "second")["reason"]
    )
