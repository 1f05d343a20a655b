"""Each setting of the training step on the CPU: trains as plain fp32 and resumes bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.run_values import metric
from tests.support.training_runs import refused, save_at_step, small, train
from trainer.config import Workload
from trainer.train import TrainStep

CNN = replace(
    small(Workload.DIGITS_CNN, epochs=2, batch_size=1024, max_steps=20, seed=3), learning_rate=5e-3
)
SAVED = 15  # within the second epoch of 13 steps

# Each setting, with how far its losses may be from those of plain fp32, relative to them. What
# takes the same arithmetic must be equal; other orders of sums differ by rounding, which 20 steps
# of Adam make larger; 16 bits keep two to three digits, and in the weights too if they are pure.
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "warm-up": ({"kernel_warmup": True}, 0.0),
    "gradients filled with zeros": ({"set_to_none": False}, 0.0),
    "deterministic": ({"deterministic": True}, 0.0),
    "activation checkpointing": ({"activation_checkpointing": True}, 0.0),
    "clipping above every norm": ({"max_grad_norm": 1e6}, 5e-3),
    "channels_last off": ({"channels_last": False}, 5e-3),
    "foreach": ({"optimizer_impl": "foreach"}, 5e-3),
    "a loop over the parameters": ({"optimizer_impl": "for-loop"}, 5e-3),
    "gradient_accumulation_steps": ({"batch_size": 256, "gradient_accumulation_steps": 4}, 5e-3),
    "bf16": ({"precision": "bf16"}, 0.05),
    "pure_bf16": ({"precision": "pure_bf16"}, 0.05),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of plain fp32."""
    losses = train(tmp_path_factory.mktemp("plain"), "run", CNN)
    assert losses[-1] < 0.9 * losses[0]
    return losses


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_trains_as_plain_fp32_and_resumes_bitwise(
    name: str, plain: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, tolerance = SETTINGS[name]
    config = replace(CNN, **changes)
    save_at_step(monkeypatch, SAVED)
    whole = train(tmp_path, "whole", config)
    if tolerance:
        np.testing.assert_allclose(whole, plain, rtol=tolerance)
    else:
        assert np.array_equal(whole, plain)
    rest = train(tmp_path, "rest", replace(config, resume_from=f"whole/step-{SAVED}.pt"))
    assert np.array_equal(rest, whole[SAVED:])
    assert np.array_equal(
        metric(tmp_path / "rest", "val/loss"), metric(tmp_path / "whole", "val/loss")[1:]
    )


def test_an_incomplete_last_step_of_an_epoch_is_averaged_over_what_it_has(tmp_path: Path) -> None:
    """12,942 samples: 4 whole steps of 3,000 in 3 batches each, then 942 in one."""
    large = replace(CNN, batch_size=3000, max_steps=0, epochs=2)
    whole = train(tmp_path, "whole", large)
    parts = train(tmp_path, "parts", replace(large, batch_size=1000, gradient_accumulation_steps=3))
    assert len(parts) == len(whole) == 10
    np.testing.assert_allclose(parts, whole, rtol=1e-4)
    seen = metric(tmp_path / "parts", "perf/samples_per_sec") * metric(
        tmp_path / "parts", "perf/step_time"
    )
    assert np.allclose(seen, [3000, 3000, 3000, 3000, 942] * 2)


def test_an_operation_without_a_deterministic_algorithm_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TrainStep.forward

    def scatter(self: TrainStep, *batch: Any) -> Any:
        torch.zeros(3).put(torch.tensor([0, 0]), torch.ones(2))
        return forward(self, *batch)

    monkeypatch.setattr(TrainStep, "forward", scatter)
    reason = refused(tmp_path, "run", replace(CNN, deterministic=True))
    assert "put_" in reason
    assert "deterministic" in reason
