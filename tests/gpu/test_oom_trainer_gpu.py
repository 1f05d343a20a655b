"""The OOM doctor in a run of our own: named with settings of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.memory.oom.classify import OomCause, OomFinding, diagnose
from stepscope.memory.oom.record import OomReport, read_report
from stepscope.run import RunStatus, read_run
from stepscope.run_setup import setup_of
from tests.support.run_values import run_json
from trainer.config import RunConfig, Workload, defaults
from trainer.runners.training_run import run as train
from trainer.training.config_validation import TrainDevice
from trainer.training.devices import list_devices

MIB = 2**20


@pytest.fixture
def gpu() -> TrainDevice:
    return next(d for d in list_devices() if d.cuda_index is not None and d.reason is None)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Let each run begin with an empty cache, and end with the whole device allowed."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def hungry(gpu: TrainDevice, **changes: Any) -> RunConfig:
    """A run whose first activations take hundreds of MiB."""
    sizes: dict[str, Any] = {"width": 64, "image_size": 128, "batch_size": 64, "max_steps": 2}
    return replace(defaults(Workload.MEMORY_STRESS, gpu.id), **sizes | changes)


def limit(gpu: TrainDevice, size: float) -> None:
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_reserved() + size) / gpu.memory_total)
    )


def failed(config: RunConfig, folder: Path) -> tuple[OomReport, OomFinding]:
    """Train until memory runs out; return what was captured and the finding."""
    folder.mkdir(exist_ok=True)
    assert train(config, folder) is RunStatus.FAILED
    report = read_report(folder)
    assert report is not None
    return report, diagnose(report.last, setup_of(run_json(folder)))


def test_a_run_that_is_too_big_says_so_and_proposes_its_settings(
    gpu: TrainDevice, tmp_path: Path
) -> None:
    limit(gpu, 400 * MIB)
    report, found = failed(hungry(gpu, batch_size=256), tmp_path / "r")
    assert found.cause is OomCause.TOO_LARGE, found.text
    assert report.ended
    assert report.last.steps_done == 0
    assert report.last.phase in ("forward", "input")
    assert [step.name for step in found.recommendations][:2] == [
        "batch_size",
        "activation_checkpointing",
    ]
    reason = run_json(tmp_path / "r")["reason"]
    assert reason.startswith("The GPU ran out of memory (tried to allocate")
    assert ": too large to fit. Lower " in reason
    (finding,) = findings(read_recorded(read_run(tmp_path / "r")))
    assert (finding.kind, finding.phase) == ("out-of-memory", report.last.phase)
    assert finding.setting == {"field": "batch_size", "value": 128}
    assert finding.text.startswith("Too large to fit: ")
