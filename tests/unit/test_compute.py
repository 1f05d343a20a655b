"""The pace, on a stream that runs its work as late as CUDA may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from trainer.training.accelerator import RUN_AHEAD, CudaAccelerator


@dataclass
class LateStream:
    """Work in order, run only when an event behind it is waited for: CUDA promises no more."""

    work: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def run_to(self, position: int) -> None:
        while self.done < position:
            self.work[self.done]()
            self.done += 1


@dataclass
class LateEvent:
    stream: LateStream
    position: int = 0

    def record(self) -> None:
        self.position = len(self.stream.work)

    def synchronize(self) -> None:
        self.stream.run_to(self.position)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """CUDA's part is played: events and the device choice."""
    made = LateStream()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: LateEvent(made))
    return made


def test_the_host_runs_so_many_steps_ahead_and_no_more(stream: LateStream) -> None:
    compute = CudaAccelerator(0)
    for step in range(1, 20):
        stream.work.append(lambda: None)
        compute.pace()
        assert step - stream.done == min(step, RUN_AHEAD)
