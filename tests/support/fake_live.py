"""A run that keeps in lists what the hooks record of a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.memory.model_states import ModelStateTracker
from stepscope.memory.oom.observer import BatchMemory
from stepscope.session.sampler import BoundarySampler
from stepscope.session.session import TrainingObserver
from tests.support.fake_recorder import FakeRecorder
from tests.support.installed_hooks import installed


@dataclass
class FakeOom:
    """Stands for OomObserver, which waits for CUDA to start."""

    batches: BatchMemory = field(default_factory=BatchMemory)
    earlier: Any = None
    trains_on: int | None = None

    def attach(self) -> None:
        pass


@dataclass
class FakeLive:
    """Stands for ScriptSession; `serve` is what happens at each boundary."""

    recorder: FakeRecorder = field(default_factory=FakeRecorder)
    devices: list[int | None] = field(default_factory=list)
    boundaries: int = 0
    world_size: int = 1
    parts: ModelStateTracker = field(default_factory=ModelStateTracker)
    readings: BoundarySampler = field(default_factory=BoundarySampler)
    serve: Any = None
    oom: FakeOom = field(default_factory=FakeOom)
    observer: TrainingObserver = field(
        default_factory=lambda: TrainingObserver(Path(), 0, step=int)
    )

    def boundary(self) -> float:
        self.boundaries += 1
        return float(self.serve()) if self.serve else 0.0

    def describe_torch(self) -> None:
        pass

    def train_on(self, cuda_index: int | None) -> None:
        self.devices.append(cuda_index)

    @property
    def rows(self) -> list[tuple[int, dict[str, float | None]]]:
        return self.recorder.rows

    def values(self, key: str) -> list[float | None]:
        """The values of a metric, of the rows that have it."""
        return [row[key] for _, row in self.rows if key in row]


@contextmanager
def hooked(live: FakeLive | None = None) -> Iterator[FakeLive]:
    """Attach all captures, and put torch back afterwards."""
    live = live or FakeLive()
    with installed(live):
        yield live
