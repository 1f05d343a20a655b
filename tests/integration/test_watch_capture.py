"""What `stepscope watch` records of scripts that print the truth, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.watched_scripts import watch


def test_the_values_are_the_scripts_own(tmp_path: Path) -> None:
    loops = watch(tmp_path, "capture_loops.py")
    assert loops.recorded("train/loss") == loops.spoken("loss"), "to the last bit"
    with_loss = [row["step"] for row in loops.rows if "train/loss" in row]
    assert with_loss == [float(step) for step in range(1, len(loops.said) + 1)]
    assert loops.run_json["optimizers"] == ["LBFGS"], "each took the place of the one before"
    assert loops.run_json["device"] == "cpu"

    first = loops.rows[: len(loops.spoken("norm"))]
    keys = {"grad_norm": "norm", "lr": "lr", "lr.group1": "bias_lr", "epoch": "epoch"}
    for key, name in keys.items():
        assert [row[f"train/{key}"] for row in first] == loops.spoken(name)
    first = loops.rows[1 : len(loops.spoken("samples"))]
    samples = [row["perf/samples_per_sec"] * row["perf/step_time"] for row in first]
    assert samples == pytest.approx(loops.spoken("samples")[1:]), "those of training alone"
    assert all(0 < row["perf/data_wait"] < row["perf/step_time"] for row in first)

    scaled = [row for row in loops.rows if "train/amp_scale" in row]
    skips = [row for row in scaled if "train/loss" not in row]
    assert [row["train/amp_skipped"] for row in skips] == [1.0, 2.0]
    steps = [row["train/amp_scale"] for row in scaled if "train/loss" in row]
    assert steps[: len(loops.spoken("scale"))] == loops.spoken("scale")
    assert [event.kind for event in loops.events].count("amp_skipped") == 1
    told = [event.text.partition(",")[0] for event in loops.events if event.kind == "epoch"]
    assert told == ["Epoch 1: 3 batches", "Epoch 2: 3 batches"]
