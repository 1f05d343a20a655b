"""A leak on the device is told from the allocator's own counters, and only a leak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.gpu.source import NullSource
from stepscope.memory.growth_detector import GrowthMonitor
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus, read_run
from stepscope.session.sampler import Sampler
from tests.support.run_values import events

KEPT = 256 * 1024
"""Bytes that the leak keeps of each step."""
STEPS = 600


class Clock:
    """Ten ticks a second and two steps a tick, whatever the simulator takes for them."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Training:
    """A small training on the device, whose sampler ticks between its steps."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.recorder = Recorder(folder, name="growth")
        self.sampler = Sampler(
            self.recorder, allocator_index=0, source=NullSource("none"), clock=self.clock
        )
        watch = GrowthMonitor(self.recorder, clock=self.clock)
        self.sampler.observers.append(watch.observe)
        self.model = nn.Linear(64, 1024).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = torch.ones(64, 64, device="cuda")
        self.kept: list[torch.Tensor] = []

    def run(self, steps: int, *, leaks: bool) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            outputs = self.model(self.x)
            outputs.square().mean().backward()
            self.optimizer.step()
            if leaks:
                self.kept.append(outputs)  # with its graph
            self.recorder.log_step({})
            if self.sampler.readings.wanted:
                self.sampler.readings.serve()
            self.clock.now += 0.05
            if self.recorder.step % 2 == 0:
                self.sampler.tick()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.recorder.close(RunStatus.FINISHED)


def test_kept_outputs_are_told_with_their_size(training: Training) -> None:
    training.run(STEPS, leaks=True)
    training.recorder.close(RunStatus.FINISHED)
    folder = training.recorder.folder
    # The simulator's device memory is memory of this process, which then grows as well.
    grown = [event for event in events(folder) if event.kind == "memory_growth"]
    [told] = [event for event in grown if event.data["where"] == "allocated"]
    assert told.data["bytes_per_step"] == pytest.approx(KEPT, rel=0.01)
    assert told.data["low"] <= KEPT <= told.data["high"]
    assert "25.0 MiB per 100 steps" in told.text
    kinds = [finding.kind for finding in findings(read_recorded(read_run(folder)))]
    assert "memory-growth" in kinds


@pytest.mark.parametrize("leaks", [(0,), (100, 80)], ids=["no leak", "a cache that is filled once"])
def test_other_trainings_do_not_grow(training: Training, leaks: tuple[int, ...]) -> None:
    for index, steps in enumerate(leaks):
        training.run(steps, leaks=index == 1)
    training.run(STEPS, leaks=False)
    training.recorder.close(RunStatus.FINISHED)
    folder = training.recorder.folder
    assert [event for event in events(folder) if event.kind == "memory_growth"] == []
    assert [f for f in findings(read_recorded(read_run(folder))) if f.kind == "memory-growth"] == []
