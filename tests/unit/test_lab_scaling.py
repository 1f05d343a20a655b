"""Ranks as arms of a sweep: which are offered, what is measured of them together, and in words."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.config import Runner, Strategy, Workload, defaults
from trainer.config_validation import TrainDevice
from trainer.lab.presets import PRESETS
from trainer.lab.result_json import scaled
from trainer.lab.trial_run import steps_together
from trainer.lab.variants import Variant, changed, make_variant

CPU = TrainDevice(id="cpu", name="a CPU", memory_total=2**33)
CONFIG = defaults(Workload.DIGITS_CNN)


def offered(config: Any, devices: list[TrainDevice]) -> list[Variant]:
    return PRESETS["scaling"].build(config, devices)[1]


def test_a_cpu_offers_as_many_ranks_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    baseline, found = PRESETS["scaling"].build(CONFIG, [CPU])
    assert baseline.num_threads == 1
    assert [(arm.changes["strategy"], arm.changes["devices_per_node"]) for arm in found] == [
        (way, ranks) for ranks in (2, 4, 6) for way in ("ddp", "fsdp")
    ]
    for arm in found:
        assert arm.problem is None
        assert changed(baseline, arm.changes).runner is Runner.TORCHRUN
        assert "runner" not in arm.label


def test_one_core_offers_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    [arm] = offered(CONFIG, [CPU])
    assert arm.problem is not None
    assert arm.problem.reason == "this machine has one core"


@pytest.mark.parametrize(("count", "most"), [(1, 1), (2, 2), (6, 6)])
def test_gpus_offer_as_many_ranks_as_there_are(count: int, most: int) -> None:
    gpus = [
        TrainDevice(
            id=f"GPU-{index}",
            name="a GPU",
            memory_total=2**34,
            cuda_index=index,
            compute_capability=(9, 0),
        )
        for index in range(count)
    ]
    found = offered(defaults(Workload.DIGITS_CNN, "GPU-0"), [*gpus, CPU])
    if most == 1:
        [arm] = found
        assert str(arm.problem) == (
            "devices_per_node: this machine has 1 GPU. Run this sweep where there are several."
        )
        return
    assert max(arm.changes["devices_per_node"] for arm in found) == most
    assert {arm.changes["strategy"] for arm in found} == {"dp", "ddp", "fsdp"}


def test_an_arm_back_to_one_process_needs_no_torchrun() -> None:
    several = changed(CONFIG, {"strategy": "ddp", "devices_per_node": 2, "runner": "torchrun"})
    arm = make_variant({"strategy": "none", "devices_per_node": 1}, several, [CPU])
    assert changed(several, arm.changes).runner is Runner.THREAD
    assert arm.problem is None


def ranks_of(ends: list[list[float]], seconds: list[list[float]]) -> list[Any]:
    return [
        SimpleNamespace(
            times=np.array(end),
            seconds=np.array(took),
            samples=np.full(len(end), 32.0),
            epochs=np.ones(len(end)),
        )
        for end, took in zip(ends, seconds, strict=True)
    ]


def test_a_step_is_as_long_as_its_last_rank_and_has_the_samples_of_all() -> None:
    """The second rank ends each step 0.1 s later: that is no time of the job."""
    late = ranks_of([[1.0, 2.0, 3.0], [1.1, 2.1, 3.1]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    seconds, samples = steps_together(late)
    assert seconds.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert samples.tolist() == [64.0, 64.0, 64.0]


def test_jitter_of_the_ranks_does_not_add_up() -> None:
    """Each step one rank or the other returns late, and begins its next step late."""
    jittered = ranks_of([[1.2, 2.0, 3.2], [1.0, 2.2, 3.0]], [[1.2, 0.8, 1.2], [1.0, 1.2, 0.8]])
    seconds, _ = steps_together(jittered)
    assert seconds[1:].sum() == pytest.approx(3.2 - 1.2)


def test_validation_between_two_steps_is_left_out() -> None:
    paused = ranks_of([[1.0, 12.0], [1.0, 12.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert steps_together(paused)[0].tolist() == [1.0, 1.0]


def verdict(effect: float | None, low: float | None, high: float | None) -> dict[str, Any]:
    return {"effect": effect, "low": low, "high": high, "text": "faster by 80.0 %"}


def test_speed_up_and_efficiency_have_the_interval_of_the_verdict() -> None:
    found = scaled(CONFIG, {"strategy": "ddp", "devices_per_node": 4}, verdict(2.2, 2.0, 2.4))
    scaling = found["scaling"]
    assert (scaling["devices"], scaling["speed_up"]) == (4, pytest.approx(3.2))
    assert scaling["efficiency"] == pytest.approx(0.8)
    assert (scaling["efficiency_low"], scaling["efficiency_high"]) == (
        pytest.approx(0.75),
        pytest.approx(0.85),
    )
    assert found["text"].endswith("3.20 times as fast [3.00, 3.40], efficiency 80 % [75, 85]")


def test_efficiency_is_against_the_devices_of_the_baseline() -> None:
    two = changed(
        CONFIG, {"strategy": Strategy.DDP, "devices_per_node": 2, "runner": Runner.TORCHRUN}
    )
    found = scaled(two, {"devices_per_node": 4}, verdict(0.5, 0.5, 0.5))
    assert found["scaling"]["efficiency"] == pytest.approx(0.75)


def test_other_arms_and_open_verdicts_have_no_figures() -> None:
    assert scaled(CONFIG, {"precision": "bf16"}, verdict(0.1, 0.0, 0.2)) == {}
    found = scaled(CONFIG, {"strategy": "ddp", "devices_per_node": 4}, verdict(None, None, None))
    assert found == {"scaling": {"devices": 4, "speed_up": None, "efficiency": None}}
