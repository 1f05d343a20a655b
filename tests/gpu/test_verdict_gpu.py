"""What a CUDA run records for its verdict, and its speed beside the GPU's peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stepscope
from stepscope.diagnosis.findings import read_recorded
from stepscope.run import RunStatus, read_run
from trainer.config import Precision, Workload, defaults
from trainer.runners.training_run import run as train
from trainer.training.devices import list_devices
from trainer.training.flops import peak_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 100 steps of the digits MLP in bf16."""
    gpu = next(d for d in list_devices() if d.cuda_index is not None and d.reason is None)
    folder = tmp_path_factory.mktemp("runs") / "r"
    folder.mkdir()
    config = replace(
        defaults(Workload.DIGITS_MLP, gpu.id),
        precision=Precision.BF16,
        batch_size=512,
        max_steps=100,
        num_threads=1,
    )
    assert train(config, folder) is RunStatus.FINISHED
    return folder


def test_the_figures_of_a_cuda_run_are_all_there(folder: Path) -> None:
    figures = read_recorded(read_run(folder)).ranks[0].figures
    assert figures.steps >= 60
    assert figures.data_wait is not None
    assert figures.copies is not None
    assert figures.device_time is not None
    assert figures.gpu_wait is not None
    assert 0 < figures.device_time < 2 * figures.step_time


def test_its_speed_is_recorded_and_the_share_where_the_peak_is_known(folder: Path) -> None:
    run = stepscope.open(folder)
    said = run.run_json
    assert said["compute_capability"] == list(_capability())
    tflops = run.series("perf/tflops").value
    seconds = run.series("perf/step_time").value
    rows = np.isfinite(tflops)
    full = rows & np.isclose(tflops * seconds * 1e12, said["flops_per_step"])
    assert full.sum() >= 0.9 * rows.sum() > 0
    peak = peak_of(said["environment"]["gpu"], Precision.BF16)
    if isinstance(peak, float):
        share = run.series("perf/mfu").value
        np.testing.assert_allclose(share[rows], 100 * tflops[rows] * 1e12 / peak)
    else:
        assert (said["peak_flops"], said["peak_reason"]) == (None, peak)
        assert "perf/mfu" not in run.metrics


def _capability() -> tuple[int, int]:
    gpu = next(d for d in list_devices() if d.cuda_index is not None and d.reason is None)
    assert gpu.compute_capability is not None
    return gpu.compute_capability
