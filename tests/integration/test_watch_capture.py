"""What `stepscope watch` records of scripts that print the truth, in real processes."""

from __future__ import annotations

import pytest

from tests.support.watched_scripts import Captured, watch


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return watch(tmp_path_factory.mktemp("runs"), "capture_loops.py")


def test_every_loss_is_the_scripts_own_to_the_last_bit(loops: Captured) -> None:
    assert loops.recorded("train/loss") == loops.spoken("loss")


def test_every_optimizer_step_is_one_step(loops: Captured) -> None:
    with_loss = [row["step"] for row in loops.rows if "train/loss" in row]
    assert with_loss == [float(step) for step in range(1, len(loops.said) + 1)]
    assert loops.run_json["optimizers"] == ["LBFGS"], "each took the place of the one before"
    assert loops.run_json["device"] == "cpu"


def test_clipping_rates_and_epochs(loops: Captured) -> None:
    first = loops.rows[: len(loops.spoken("norm"))]
    assert [row["train/grad_norm"] for row in first] == loops.spoken("norm")
    assert [row["train/lr"] for row in first] == loops.spoken("lr")
    assert [row["train/lr.group1"] for row in first] == loops.spoken("bias_lr")
    assert [row["train/epoch"] for row in first] == loops.spoken("epoch")


def test_samples_are_those_of_training_alone(loops: Captured) -> None:
    first = loops.rows[1 : len(loops.spoken("samples"))]
    samples = [row["perf/samples_per_sec"] * row["perf/step_time"] for row in first]
    assert samples == pytest.approx(loops.spoken("samples")[1:])
    assert all(0 < row["perf/data_wait"] < row["perf/step_time"] for row in first)


def test_scale_and_skipped_steps(loops: Captured) -> None:
    scaled = [row for row in loops.rows if "train/amp_scale" in row]
    skips = [row for row in scaled if "train/loss" not in row]
    assert [row["train/amp_skipped"] for row in skips] == [1.0, 2.0]
    steps = [row["train/amp_scale"] for row in scaled if "train/loss" in row]
    assert steps[: len(loops.spoken("scale"))] == loops.spoken("scale")
    assert [event.kind for event in loops.events].count("amp_skipped") == 1


def test_epochs_are_events(loops: Captured) -> None:
    told = [event.text.partition(",")[0] for event in loops.events if event.kind == "epoch"]
    assert told == ["Epoch 1: 3 batches", "Epoch 2: 3 batches"]
