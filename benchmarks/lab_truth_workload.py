"""A workload with planted effects for `lab_truth.py`: a user's own file, with settings of its own.

    python -m trainer.lab --workload benchmarks/lab_truth_workload.py:build --variants delayed,no_op

A step computes for somewhat less than a millisecond, then waits for `DEVICE_S`, as for a device.
The loader makes it longer by a known factor: it looks how long the step has taken, and waits that
much times the factor less one. So the true effect is known on any machine: a step of `delayed`
takes 1.05 times as long as one of the baseline. The computing has the machine's own noise. Without
the wait that noise was 3.5 to 5 % from process to process on a shared machine of two cores: there
the lab rightly answers "undecided" to an effect of 5 %.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.workloads.task import Batch, Task, TensorSplit

SETTINGS = {
    "delayed": "The loader waits so long that each step takes 5 % longer.",
    "no_op": "Does nothing at all.",
}

DELAY = 0.05
DEVICE_S = 0.006
DRIFT_FOLDER = "LAB_TRUTH_DRIFT"
"""Names a sweep's folder: each sample that it has already makes the next one slower."""
DRIFT_A_SAMPLE = 0.06 / 36
"""6 % over a sweep of 12 rounds of three."""
SAMPLES, INPUTS, HIDDEN, CLASSES = 512, 64, 256, 10


class SlowedSplit:
    """A TensorSplit whose `take` waits until the step has taken `factor` times its own time."""

    def __init__(self, split: TensorSplit, factor: float) -> None:
        self._split = split
        self._factor = factor
        self._given: float | None = None

    @property
    def length(self) -> int:
        """Samples of an epoch: so many that no measured window holds a second one."""
        return self._split.length

    def take(self, indices: Tensor) -> Batch:
        """Return the batch, late."""
        batch = self._split.take(indices)
        now = time.perf_counter()
        if self._given is not None:
            until = self._given + (now - self._given + DEVICE_S) * self._factor
            # Not a sleep: the delay is 350 µs, and a sleep overshoots by 60 or more.
            while time.perf_counter() < until:
                pass
        self._given = time.perf_counter()
        return batch

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch."""
        return self._split.room(size)


def build(config: RunConfig) -> Task:
    """Return a small network on random numbers."""
    generator = torch.Generator().manual_seed(config.seed)
    inputs = torch.randn((SAMPLES, INPUTS), generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    factor = drift() * (1 + DELAY if config.has("delayed") else 1.0)
    return Task(
        model=nn.Sequential(
            nn.Linear(INPUTS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        ),
        train=SlowedSplit(TensorSplit(inputs, targets, 1_000_000), factor),
        validation=TensorSplit.of(inputs, targets),
        loss=nn.CrossEntropyLoss(),
    )


def drift() -> float:
    """Return how many times longer the steps of this sample take, by its number in the sweep."""
    folder = os.environ.get(DRIFT_FOLDER)
    path = Path(folder or "") / "samples.jsonl"
    taken = path.read_text().count("\n") if folder and path.exists() else 0
    return 1 + DRIFT_A_SAMPLE * taken
