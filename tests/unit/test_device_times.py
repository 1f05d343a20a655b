"""Times of a step on the device, with a device whose clock and progress a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from stepscope.store.cuda_readback import CudaEventTimerPool, MetricRow
from tests.support.fake_copies import replace_copies
from trainer.training import accelerator
from trainer.training.accelerator import CudaStepTimer, TimedScalars


@dataclass
class Device:
    """Runs queued work only up to `finish`; one tick per piece of work."""

    queued_ms: float = 0.0
    reached: int = 0
    recorded: int = 0
    broken: bool = False
    events: list[FakeEvent] = field(default_factory=list)

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def finish(self) -> None:
        self.reached = self.recorded


@dataclass
class FakeEvent:
    device: Device
    at_ms: float = 0.0
    number: int = 0

    def record(self) -> None:
        self.device.recorded += 1
        self.number, self.at_ms = self.device.recorded, self.device.queued_ms

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.number <= self.device.reached

    def synchronize(self) -> None:
        self.device.reached = max(self.device.reached, self.number)

    def elapsed_time(self, end: FakeEvent) -> float:
        if not end.query():
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    replace_copies(monkeypatch, made.event)
    pairs = cache(lambda index: CudaEventTimerPool(made.event, accelerator.PAIRS_LIMIT))
    monkeypatch.setattr(accelerator, "_pool_of", pairs)
    return made


class Steps:
    """Steps of a loop: a copy and computation for each batch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.times = CudaStepTimer(torch.device("cuda", 0))
        self.rows: list[tuple[int, MetricRow]] = []
        self.reader = TimedScalars(lambda step, ts, row: self.rows.append((step, row)), self.times)

    def batch(self, *, copy_ms: float = 2.0, compute_ms: float = 5.0) -> None:
        with self.times.copy():
            self.device.queued_ms += copy_ms
        with self.times.compute():
            self.device.queued_ms += compute_ms

    def close(self, step: int) -> None:
        self.reader.put(step, 0.0, {}, {"train/loss": torch.tensor(0.5)})

    def row(self, step: int) -> MetricRow:
        self.close(step)
        self.reader.flush()
        return self.rows[-1][1]


def test_a_step_gets_its_own_times_some_steps_later(device: Device) -> None:
    steps = Steps(device)
    for step in (1, 2, 3):
        steps.batch(copy_ms=step, compute_ms=10 * step)
        steps.close(step)
    steps.reader.poll()
    assert steps.rows == [], "nothing is waited for"
    device.finish()
    steps.reader.poll()
    for step, row in steps.rows:
        assert row["perf/h2d"] == pytest.approx(step / 1e3)
        assert row["perf/gpu_time"] == pytest.approx(step / 1e2)
        assert row["train/loss"] == 0.5
    assert [step for step, _ in steps.rows] == [1, 2, 3]
    made = len(device.events)
    steps.batch()
    assert len(device.events) == made, "event pairs are used again"


def test_the_batches_of_an_accumulated_step_are_added_up(device: Device) -> None:
    steps = Steps(device)
    steps.times.waited(7.0)  # of the validation
    for _ in range(4):
        steps.batch()
        device.queued_ms += 100.0  # idle between the batches
    steps.times.waited(0.25)
    row = steps.row(1)
    assert row["perf/h2d"] == pytest.approx(0.008)
    assert row["perf/gpu_time"] == pytest.approx(0.020)
    assert row["perf/gpu_wait"] == 0.25


def test_times_beyond_limits_are_missing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "PAIRS_LIMIT", 3)
    steps = Steps(device)
    steps.batch()
    steps.batch()
    assert steps.row(1).keys() == {"perf/h2d", "train/loss"}
    steps.batch()
    assert steps.row(2)["perf/gpu_time"] == pytest.approx(0.005)
    steps.batch()
    device.broken = True
    assert steps.row(3) == {}
