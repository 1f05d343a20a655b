"""Loading and copying on CUDA: what each switch does, and how long copies and computing take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.run import RunStatus
from tests.integration.test_training import metric, run_json
from trainer.config import RunConfig, Workload, defaults
from trainer.devices import list_devices
from trainer.problems import TrainDevice
from trainer.training.run import run as train


@pytest.fixture
def gpu() -> TrainDevice:
    return next(d for d in list_devices() if d.cuda_index is not None and d.reason is None)


def small(gpu: TrainDevice, **changes: Any) -> RunConfig:
    config = defaults(Workload.DIGITS_MLP, gpu.id)
    return replace(config, **{"epochs": 2, "batch_size": 1024, "threads": 1, **changes})


def finished(config: RunConfig, folder: Path) -> np.ndarray:
    """Train to the end and return the losses."""
    folder.mkdir()
    assert train(config, folder) is RunStatus.FINISHED, run_json(folder)["reason"]
    return metric(folder, "train/loss")


def test_every_step_has_the_gpus_times(gpu: TrainDevice, tmp_path: Path) -> None:
    steps = len(finished(small(gpu), tmp_path / "run"))
    for key in ("perf/gpu_time", "perf/gpu_wait"):
        values = metric(tmp_path / "run", key)
        assert len(values) == steps, key
        assert (values >= 0).all(), key
    assert metric(tmp_path / "run", "perf/gpu_time").min() > 0
