"""Training on a real GPU: every precision, the buttons, OOM, and no hidden wait in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.run import RunStatus
from stepscope.store.cuda_readback import MetricRow
from stepscope.store.reader import send_command
from tests.gpu.conftest import waiting_raises
from tests.support.run_values import event_of, events, metric, run_json
from tests.support.training_runs import background, refused
from tests.support.waiting import wait_for
from trainer.config import Precision, RunConfig, Workload, defaults
from trainer.runners.training_run import run as train
from trainer.train import build_train_step
from trainer.training.accelerator import CudaAccelerator
from trainer.training.config_validation import TrainDevice, choice_problem
from trainer.training.loaders import Loader
from trainer.training.model import prepare
from trainer.training.precision import run_flags
from trainer.training.state import TrainState
from trainer.workloads.build import WORKLOADS

MIB = 2**20


@pytest.fixture
def no_limit(gpu: TrainDevice) -> Iterator[None]:
    """Lift the memory fraction that a test sets."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, gpu.cuda_index)


def small(gpu: TrainDevice, workload: Workload, **changes: Any) -> RunConfig:
    """A run that also a CPU, where one simulates the GPU, computes in seconds."""
    size = {"width": 8, "image_size": 16} if workload is Workload.MEMORY_STRESS else {}
    return replace(defaults(workload, gpu.id), **{"epochs": 3, **size, **changes})


def test_buttons_and_sampler_during_a_cuda_run(gpu: TrainDevice, tmp_path: Path) -> None:
    config = replace(small(gpu, Workload.MEMORY_STRESS, batch_size=256), epochs=10_000)
    with background(config, tmp_path):
        wait_for(lambda: run_json(tmp_path).get("step", 0) > 40, 60)
        send_command(tmp_path, "pause", {})
        event_of(tmp_path, "pause")
        send_command(tmp_path, "empty_cache", {})
        emptied = event_of(tmp_path, "empty_cache")
        before, after = emptied.data["before"], emptied.data["after"]
        assert after["memory/reserved"] < before["memory/reserved"]
        assert after["memory/allocated"] == before["memory/allocated"]
        send_command(tmp_path, "reset_peaks", {})
        reset = event_of(tmp_path, "reset_peaks").data
        assert reset["after"]["memory/peak_allocated"] == reset["after"]["memory/allocated"]
        assert reset["after"]["memory/peak_allocated"] < reset["before"]["memory/peak_allocated"]
    for key in ("memory/allocated", "memory/reserved", "memory/peak_allocated"):
        assert len(metric(tmp_path, key, "samples")) > 5, key


def test_an_oom_leaves_memory_at_its_baseline_and_the_next_run_works(
    gpu: TrainDevice, no_limit: None, tmp_path: Path
) -> None:
    (tmp_path / "warm").mkdir()
    train(small(gpu, Workload.MEMORY_STRESS), tmp_path / "warm")
    before = torch.cuda.memory_allocated(gpu.cuda_index)
    torch.cuda.set_per_process_memory_fraction(512 * MIB / gpu.memory_total, gpu.cuda_index)
    hungry = small(gpu, Workload.MEMORY_STRESS, width=64, image_size=128, batch_size=256)
    assert "ran out of memory" in refused(tmp_path, "oom", hungry)
    assert (tmp_path / "oom" / "traceback.txt").is_file()
    oom = next(event for event in events(tmp_path / "oom") if event.kind == "oom")
    assert oom.data["before"]["memory/allocated"] > oom.data["after"]["memory/allocated"]
    assert torch.cuda.memory_allocated(gpu.cuda_index) == before
    assert torch.cuda.memory_reserved(gpu.cuda_index) <= before + 64 * MIB
    torch.cuda.set_per_process_memory_fraction(1.0, gpu.cuda_index)
    (tmp_path / "next").mkdir()
    assert train(small(gpu, Workload.MEMORY_STRESS), tmp_path / "next") is RunStatus.FINISHED


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_steady_step_never_synchronizes(
    gpu: TrainDevice, compute: CudaAccelerator, precision: Precision, max_grad_norm: float
) -> None:
    """Load, step, pace and read losses with torch raising at every synchronizing call."""
    config = small(gpu, Workload.DIGITS_CNN, precision=precision, max_grad_norm=max_grad_norm)
    if problem := choice_problem("precision", precision, config, [gpu]):
        pytest.skip(str(problem))
    with run_flags(config):
        task = WORKLOADS[config.workload](config)
        training = TrainState(config, prepare(task.model, config, compute.device), compute)
        step = build_train_step(training, task)
        rows: list[tuple[int, MetricRow]] = []
        reader = compute.reader(lambda number, _, row: rows.append((number, row)))
        loader = Loader(task.train, config, compute)
        batches = loader.batches(training.order(task.train.length))
        with ExitStack() as watched:
            for number, batch in enumerate(batches):
                if number == 10:  # warm: lazily made handles and buffers exist now
                    watched.enter_context(waiting_raises())
                loss, norm = step(*batch)
                compute.pace()
                scalars = {"train/loss": loss} | ({"norm": norm} if norm is not None else {})
                reader.put(number, 0.0, {}, scalars)
                reader.poll()
        reader.flush()
    assert [number for number, _ in rows] == list(range(len(rows)))
    assert np.isfinite([row["train/loss"] or np.nan for _, row in rows]).all()
