"""Whole runs on the CPU through `run`: what they learn, record and answer."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepscope
from stepscope.run import RunStatus
from tests.support.run_values import events, metric, run_json
from tests.support.training_runs import SMALL, small
from trainer.config import Optimizer, Precision, Workload, defaults
from trainer.runners.training_run import run as train
from trainer.training.accelerator import CpuAccelerator
from trainer.training.state import TrainState


@pytest.mark.parametrize("workload", list(SMALL))
def test_each_workload_trains_and_records_every_step(workload: Workload, tmp_path: Path) -> None:
    flags = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    threads = torch.get_num_threads()
    epochs = 20 if workload is Workload.LINEAR else 2
    config = small(workload, epochs=epochs, max_grad_norm=10.0)
    assert train(config, tmp_path) is RunStatus.FINISHED
    run = run_json(tmp_path)
    loss = metric(tmp_path, "train/loss")
    assert run["status"] == "finished"
    assert len(loss) == run["total_steps"] == epochs * run["steps_per_epoch"] == run["step"]
    assert loss[-5:].mean() < 0.9 * loss[:5].mean()
    assert len(metric(tmp_path, "val/loss")) == epochs
    for key in ("train/lr", "train/grad_norm", "perf/step_time", "perf/samples_per_sec"):
        assert (metric(tmp_path, key) > 0).all(), key
    kinds = [event.kind for event in events(tmp_path)]
    assert kinds.count("epoch") == epochs
    assert {"best.pt", "last.pt"} <= {path.name for path in tmp_path.iterdir()}
    assert run["environment"]["torch"] == torch.__version__
    assert run["environment"]["gpu"] is None
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == flags
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [(Precision.BF16, Optimizer.ADAM), *((Precision.FP16, one) for one in Optimizer)],
)
def test_mixed_precision_trains_on_a_cpu(
    precision: Precision, optimizer: Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 the first steps overflow and are skipped, until the loss scale is small enough."""
    large = partial(torch.amp.GradScaler, init_scale=2.0**30)
    monkeypatch.setattr(torch.amp, "GradScaler", large)
    rate = 0.2 if optimizer is Optimizer.SGD else 1e-3
    config = small(Workload.DIGITS_MLP, precision=precision, optimizer=optimizer, max_steps=120)
    config = replace(config, learning_rate=rate)
    assert train(config, tmp_path) is RunStatus.FINISHED
    loss = metric(tmp_path, "train/loss")
    assert loss[-5:].mean() < 0.8 * loss[:5].mean()
    if precision is Precision.FP16:
        assert 1 < metric(tmp_path, "train/amp_scale")[-1] < 2.0**30
        assert loss[0] == pytest.approx(loss[1], rel=0.1), "no step with infinite gradients"


def test_nothing_of_a_training_is_kept_when_its_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    def count(_: CpuAccelerator) -> None:
        kept.append(sum(type(one) is TrainState for one in gc.get_objects()))

    monkeypatch.setattr(CpuAccelerator, "release", count)
    assert train(small(Workload.LINEAR), tmp_path) is RunStatus.FINISHED
    assert kept == [0]


def trained(folder: Path, **changes: Any) -> stepscope.Run:
    folder.mkdir()
    config = replace(
        defaults(Workload.MEMORY_STRESS), batch_size=8, width=8, image_size=16, max_steps=4
    )
    assert train(replace(config, **changes), folder) is RunStatus.FINISHED
    return stepscope.open(folder)


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
