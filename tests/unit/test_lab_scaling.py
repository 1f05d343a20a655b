"""Ranks as variants of a sweep: the offer, the joint measurement, and the text."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stepscope.lab.measurement import steps_together
from stepscope.lab.plan import Variant
from trainer.config import Runner, Workload, defaults
from trainer.lab.plan import changed
from trainer.lab.presets import PRESETS
from trainer.training.config_validation import TrainDevice

CPU = TrainDevice(id="cpu", name="a CPU", memory_total=2**33)
CONFIG = defaults(Workload.DIGITS_CNN)


def offered(config: Any, devices: list[TrainDevice]) -> list[Variant]:
    return PRESETS["scaling"].build(config, devices)[1]


def test_a_cpu_offers_as_many_ranks_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    baseline, found = PRESETS["scaling"].build(CONFIG, [CPU])
    assert baseline.num_threads == 1
    assert [
        (variant.changes["strategy"], variant.changes["devices_per_node"]) for variant in found
    ] == [(way, ranks) for ranks in (2, 4, 6) for way in ("ddp", "fsdp")]
    for variant in found:
        assert variant.problem is None
        assert changed(baseline, variant.changes).runner is Runner.TORCHRUN


def test_gpus_offer_as_many_ranks_as_there_are() -> None:
    gpu = TrainDevice(id="", name="a GPU", memory_total=2**34, compute_capability=(9, 0))
    gpus = [replace(gpu, id=f"GPU-{index}", cuda_index=index) for index in range(6)]
    config = defaults(Workload.DIGITS_CNN, "GPU-0")
    [variant] = offered(config, [gpus[0], CPU])
    assert variant.problem is not None
    found = [dict(one.changes) for one in offered(config, [*gpus, CPU])]
    assert max(one["devices_per_node"] for one in found) == 6
    assert {one["strategy"] for one in found} == {"dp", "ddp", "fsdp"}


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
    # The second rank ends each step 0.1 s later: that is not time of the job.
    late = ranks_of([[1.0, 2.0, 3.0], [1.1, 2.1, 3.1]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    seconds, samples = steps_together(late)
    assert seconds.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert samples.tolist() == [64.0, 64.0, 64.0]
    # In each step one rank or the other returns late, and begins its next step late.
    jittered = ranks_of([[1.2, 2.0, 3.2], [1.0, 2.2, 3.0]], [[1.2, 0.8, 1.2], [1.0, 1.2, 0.8]])
    assert steps_together(jittered)[0][1:].sum() == pytest.approx(3.2 - 1.2)
    # Validation between two steps does not count.
    paused = ranks_of([[1.0, 12.0], [1.0, 12.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert steps_together(paused)[0].tolist() == [1.0, 1.0]
