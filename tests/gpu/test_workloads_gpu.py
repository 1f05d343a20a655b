"""The workloads that read files, text or the user's code, and those that only compute, on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.run import RunStatus
from tests.gpu.conftest import SIMULATED
from tests.support.run_values import metric, run_json
from tests.support.training_runs import SMALL
from trainer.config import Precision, RunConfig, Workload, defaults
from trainer.runners.training_run import run as train
from trainer.training.config_validation import TrainDevice, validate
from trainer.workloads import custom_file, datasets
from trainer.workloads.digit_images import write

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_workload.py"
SIZES = SMALL | {Workload.IMAGES: {"image_size": 8, "horizontal_flip": False}, Workload.CUSTOM: {}}
NEW = [Workload.GPT, Workload.RESNET, Workload.IMAGES, Workload.CUSTOM]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "digits")
    return folder


@pytest.fixture(autouse=True)
def given(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Image data and a workload of the user's own, as at the start of the page."""
    monkeypatch.setenv(datasets.VARIABLE, str(data_folder))
    monkeypatch.setenv(custom_file.VARIABLE, f"{EXAMPLE}:build")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("user_workload_own_workload", None)


def small(gpu: TrainDevice, workload: Workload, **changes: Any) -> RunConfig:
    base = replace(defaults(workload, gpu.id), **SIZES[workload])
    return replace(base, **{"max_steps": 30, "learning_rate": 3e-3, **changes})


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.PURE_BF16])
@pytest.mark.parametrize("workload", NEW)
def test_each_workload_learns_in_each_precision(
    gpu: TrainDevice, workload: Workload, precision: Precision, tmp_path: Path
) -> None:
    config = small(gpu, workload, precision=precision)
    if validate(config, [gpu]):
        pytest.skip(str(validate(config, [gpu])[0]))
    layer_norm = workload is Workload.GPT and precision is Precision.PURE_BF16
    if layer_norm and SIMULATED:
        pytest.skip("the simulator has no backward pass of a layer norm in bf16")
    assert train(config, tmp_path) is RunStatus.FINISHED, run_json(tmp_path)["reason"]
    loss = metric(tmp_path, "train/loss")
    assert np.isfinite(loss).all()
    assert loss[-5:].mean() < 0.95 * loss[:5].mean()


def test_mirrored_images_and_dropout_are_drawn_anew_in_a_cuda_graph(
    gpu: TrainDevice, tmp_path: Path
) -> None:
    """A replayed graph that drew the same numbers each time would leave the loss of one batch."""
    for workload, changes in (
        (Workload.IMAGES, {"horizontal_flip": True}),
        (Workload.GPT, {"dropout": 0.5, "learning_rate": 1e-8}),
    ):
        folder = tmp_path / f"{workload}{'-'.join(changes)}"
        folder.mkdir()
        config = small(gpu, workload, cuda_graphs=True, **changes)
        assert not validate(config, [gpu])
        assert train(config, folder) is RunStatus.FINISHED, run_json(folder)["reason"]
        assert len(np.unique(metric(folder, "train/loss"))) > 20
