"""A sample of the lab on CUDA: what only a GPU tells, and techniques that only it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Need
from trainer.config import Workload, defaults
from trainer.devices import cuda_reason, list_devices
from trainer.lab.trial_process import TrialProcess


@pytest.fixture
def gpu(need: Need) -> str:
    need(cuda_reason())
    return next(device.id for device in list_devices() if device.cuda_index is not None)


def take(folder: Path, gpu: str, **changes: Any) -> dict[str, Any]:
    job = {
        "config": defaults(Workload.DIGITS_MLP, gpu).to_dict(),
        "changes": changes,
        "seed": 1,
        "warmup": 10,
        "steps": 40,
        "seconds": 1.0,
    }
    return TrialProcess(folder).take(job, 110)


def test_a_sample_on_a_gpu_has_its_memory_times_and_clocks(tmp_path: Path, gpu: str) -> None:
    answer = take(tmp_path, gpu)
    metrics = answer["metrics"]
    for name in ("peak_allocated", "peak_reserved", "gpu_time", "h2d", "samples_per_sec"):
        assert metrics[name] > 0, name
    assert metrics["peak_allocated"] <= metrics["peak_reserved"]
    assert metrics["throttle"] is None or isinstance(metrics["throttle"], str)
    assert answer["machine"]["gpu"]


def test_captured_steps_reach_the_loss_of_eager_ones(tmp_path: Path, gpu: str) -> None:
    eager, captured = take(tmp_path, gpu), take(tmp_path, gpu, cuda_graphs=True)
    assert captured["metrics"]["loss"] == pytest.approx(eager["metrics"]["loss"], rel=1e-4)
