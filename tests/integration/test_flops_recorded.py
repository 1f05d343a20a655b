"""A run records the operations of its steps: model FLOPs, whatever is computed twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepscope
from stepscope.run import RunStatus
from trainer.config import Precision, Workload, defaults
from trainer.training.train import run as train


def trained(folder: Path, **changes: Any) -> stepscope.Run:
    folder.mkdir()
    config = replace(
        defaults(Workload.MEMORY_STRESS), batch_size=8, width=8, image_size=16, max_steps=4
    )
    assert train(replace(config, **changes), folder) is RunStatus.FINISHED
    return stepscope.open(folder)


def test_what_checkpointing_computes_again_does_not_count(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain")
    again = trained(tmp_path / "again", activation_checkpointing=True)
    assert plain.run_json["flops_per_step"] == again.run_json["flops_per_step"] > 0


@pytest.mark.parametrize(
    ("changes", "batches"),
    [({"gradient_accumulation_steps": 2}, 2), ({"precision": Precision.PURE_BF16}, 1)],
)
def test_a_step_of_several_batches_counts_all_of_them(
    tmp_path: Path, changes: dict[str, Any], batches: int
) -> None:
    one = trained(tmp_path / "one").run_json["flops_per_step"]
    run = trained(tmp_path / "several", **changes)
    assert run.run_json["flops_per_step"] == batches * one
    tflops, seconds = (run.series(f"perf/{name}").value for name in ("tflops", "step_time"))
    rows = np.isfinite(tflops)
    np.testing.assert_allclose(tflops[rows] * seconds[rows] * 1e12, batches * one)
    assert rows.sum() == 4
