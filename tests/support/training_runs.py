"""Small runs of the built-in training: in this process, a thread or a worker."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.run import RunStatus
from tests.support.child_process import ROOT
from tests.support.run_values import metric, run_json
from trainer.config import RunConfig, Workload, defaults
from trainer.runners.training_run import run
from trainer.train import TrainStep, build_train_step
from trainer.training.accelerator import CpuAccelerator
from trainer.training.checkpoint import write_checkpoint
from trainer.training.commands import TrainerCommands
from trainer.training.state import TrainState
from trainer.workloads.task import Task

SMALL: dict[Workload, dict[str, Any]] = {
    Workload.LINEAR: {},
    Workload.DIGITS_MLP: {},
    Workload.DIGITS_CNN: {},
    Workload.GPT: {"num_layers": 1, "width": 16, "context_length": 16, "batch_size": 64},
    Workload.RESNET: {"width": 8, "image_size": 32, "batch_size": 64},
    Workload.MEMORY_STRESS: {"width": 8, "image_size": 8},
}


def small(workload: Workload, **changes: Any) -> RunConfig:
    base = replace(defaults(workload), epochs=2, num_threads=1)
    return replace(base, **(SMALL[workload] | changes))


@contextmanager
def background(config: RunConfig, folder: Path) -> Iterator[threading.Event]:
    """A run in a thread, as the thread runner starts it; ends it if the test does not."""
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(config, folder), kwargs={"stop": stop})
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def train(root: Path, name: str, config: RunConfig) -> np.ndarray:
    """Run to the end in its own folder and return the losses."""
    (root / name).mkdir()
    assert run(config, root / name) is RunStatus.FINISHED, run_json(root / name)["reason"]
    return metric(root / name, "train/loss")


def fails_at(monkeypatch: pytest.MonkeyPatch, number: int, error: Exception) -> None:
    """Let the step of this number raise instead of training."""
    train, calls = TrainStep.__call__, itertools.count(1)

    def step(self: TrainStep, *batch: torch.Tensor) -> Any:
        if next(calls) == number:
            raise error
        return train(self, *batch)

    monkeypatch.setattr(TrainStep, "__call__", step)


def start_worker(config: RunConfig, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start the worker process of a run."""
    child = subprocess.Popen(
        [sys.executable, "-m", "trainer.runners.worker", str(folder)],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(config.to_dict()).encode() + b"\n")
    child.stdin.flush()
    return child


def losses_on_one_batch(task: Task, config: RunConfig, samples: int) -> list[float]:
    """The losses of 30 steps on the same samples, on the CPU."""
    step = build_train_step(TrainState(config, task.model, CpuAccelerator()), task)
    batch = task.train.take(torch.arange(samples))
    return [step(*batch)[0].item() for _ in range(30)]


def refused(root: Path, name: str, config: RunConfig) -> str:
    """Run in its own folder, where the run has to fail, and return its reason."""
    (root / name).mkdir(exist_ok=True)
    assert run(config, root / name) is RunStatus.FAILED
    return str(run_json(root / name)["reason"])


def save_at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the next run save a checkpoint after a step, as the button does."""

    def save(self: TrainerCommands) -> None:
        if self._training.step == step:
            path = self._recorder.folder / f"step-{step}.pt"
            write_checkpoint(path, self._training.state_dict())

    monkeypatch.setattr(TrainerCommands, "check", save)
