"""The page-locked ring and the pace, on a stream that runs its work as late as CUDA may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from trainer.config import RunConfig
from trainer.training import copies
from trainer.training.compute import RUN_AHEAD, CudaCompute
from trainer.training.data import MemoryLoader
from trainer.workloads.task import Batch, TensorSplit


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
    waits: int = 0

    def record(self) -> None:
        self.position = len(self.stream.work)

    def synchronize(self) -> None:
        self.waits += self.position > self.stream.done
        self.stream.run_to(self.position)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """CUDA's part is played: events, the device choice, pinning and the asynchronous copy."""
    made = LateStream()

    def late_copy(batch: Batch, *_: object) -> Batch:
        inputs, targets = torch.zeros_like(batch[0]), torch.zeros_like(batch[1])

        def copy() -> None:
            inputs.copy_(batch[0])
            targets.copy_(batch[1])

        made.work.append(copy)
        return inputs, targets

    def room(*_: object, pin_memory: bool) -> Batch:
        assert pin_memory
        return torch.empty(4, 1), torch.empty(4, dtype=torch.int64)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: LateEvent(made))
    monkeypatch.setattr(copies, "_to", late_copy)
    monkeypatch.setattr(TensorSplit, "room", room)
    return made


def test_the_host_runs_so_many_steps_ahead_and_no_more(stream: LateStream) -> None:
    compute = CudaCompute(0)
    for step in range(1, 20):
        stream.work.append(lambda: None)
        compute.pace()
        assert step - stream.done == min(step, RUN_AHEAD)


@pytest.mark.parametrize("buffers", range(1, RUN_AHEAD + 3))
def test_no_buffer_is_filled_while_its_copy_is_under_way(stream: LateStream, buffers: int) -> None:
    """With RUN_AHEAD + 1 buffers every copy has ended by itself: only the pace waits."""
    values = torch.arange(50)
    split = TensorSplit.of(values.float().unsqueeze(1), values)
    compute = CudaCompute(0)
    loader = MemoryLoader(split, RunConfig(batch_size=4, pin_memory=True), compute)
    ring = loader._copies.ring
    assert len(ring.buffers) == RUN_AHEAD + 2
    del ring.buffers[buffers:]
    for seed in range(2):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
        arrived = []
        for batch in loader.batches(order):
            compute.pace()
            arrived.append(batch)
        waits: list[int] = [event.waits for event in ring._copied]  # type: ignore[attr-defined]
        assert (sum(waits) == 0) == (buffers > RUN_AHEAD)
        stream.run_to(len(stream.work))  # as the validation's result does
        targets = torch.cat([targets for _, targets in arrived])
        assert torch.equal(targets, order)
        assert torch.equal(torch.cat([inputs[:, 0] for inputs, _ in arrived]), targets.float())


def test_a_caller_that_does_not_pace_gets_whole_batches_too(stream: LateStream) -> None:
    values = torch.arange(50)
    split = TensorSplit.of(values.float().unsqueeze(1), values)
    loader = MemoryLoader(split, RunConfig(batch_size=4, pin_memory=True), CudaCompute(0))
    arrived = list(loader.batches(values))
    stream.run_to(len(stream.work))
    assert torch.equal(torch.cat([targets for _, targets in arrived]), values)
