"""Hugging Face's Trainer and Lightning under watch: their own loops, none of ours, no callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.watched_scripts import Captured, watch


def micro_sums(captured: Captured) -> list[float]:
    """The losses of the optimizer steps, each of two micro-batches."""
    losses = captured.spoken("micro_loss")
    return [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)]


@pytest.mark.parametrize("framework", ["huggingface", "lightning"])
def test_loss_steps_epochs_samples_rates_and_norms(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if framework == "huggingface" else framework)
    output = [str(tmp_path / "output")] if framework == "huggingface" else []
    captured = watch(tmp_path / "runs", f"capture_{framework}.py", *output)
    assert captured.recorded("train/loss") == micro_sums(captured)
    assert captured.recorded("step") == [1, 2, 3, 4, 5, 6]
    assert captured.recorded("train/backwards") == [2.0] * 6
    assert captured.recorded("train/epoch") == [1, 1, 1, 2, 2, 2]
    assert captured.run_json["device"] == "cpu"
    timed = captured.rows[1:]
    samples = [row["perf/samples_per_sec"] * row["perf/step_time"] for row in timed]
    assert sum(samples) <= 48 - 8, "evaluation's batches are not among them"
    assert all(row["perf/data_wait"] < row["perf/step_time"] for row in timed)
    rates, norms = captured.recorded("train/lr"), captured.recorded("train/grad_norm")
    if framework == "huggingface":
        assert (rates, captured.run_json["optimizers"]) == (captured.spoken("lr"), ["AdamW"])
        assert norms == pytest.approx(captured.spoken("norm"))
    else:
        assert (rates, captured.run_json["optimizers"]) == ([0.1] * 3 + [0.05] * 3, ["Adam"])
        assert len(norms) == 6
        assert not list(Path(__file__).parents[1].joinpath("scripts").glob("lightning_logs"))


@pytest.mark.parametrize("framework", ["accelerate", "huggingface", "lightning"])
def test_epochs_and_samples_of_every_step(framework: str, tmp_path: Path) -> None:
    """Readers ahead, evaluation fetched with gradients on, a limit of batches an epoch."""
    pytest.importorskip("transformers" if framework == "huggingface" else framework)
    captured = watch(tmp_path, "capture_epochs.py", framework)
    assert captured.recorded("train/epoch") == captured.spoken("epoch")
    assert captured.run_json["epoch"] == captured.spoken("epoch")[-1]
    samples = [row["perf/samples_per_sec"] * row["perf/step_time"] for row in captured.rows[1:]]
    assert samples == pytest.approx(captured.spoken("samples")[1:])
