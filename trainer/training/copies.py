"""The way of a batch from the host to the device. On a CPU there is none: the batch stays.

On a GPU the batch is copied, from page-locked memory with `pin_memory`, without the host waiting
for it with `non_blocking`, and with `copy_stream` on a stream beside that of the computing. The
host is up to two steps ahead of the GPU (`Compute.pace`), so there a copy runs while the steps
before it are computed.
"""

from __future__ import annotations

import torch

from trainer.config import RunConfig
from trainer.training.compute import RUN_AHEAD, Compute
from trainer.training.device_times import DeviceTimes
from trainer.workloads.task import Batch, Split


class PinnedRing:
    """Page-locked buffers for the batches under way, used again and again.

    Freeing one records a CUDA event. That ends the process if the GPU has failed and nobody has
    noticed yet, so none is freed before the run's end is known. Without `pin_memory`, and on a CPU,
    there are none.
    """

    def __init__(self, split: Split, config: RunConfig, compute: Compute) -> None:
        self.buffers: list[Batch] = []
        if config.pin_memory and compute.on_gpu:
            size = min(config.batch_size, split.length)
            # The copies of the RUN_AHEAD steps before may be under way. One more than needed, so
            # that `room` finds its copy done and does not wait.
            self.buffers = [split.room(size, pin_memory=True) for _ in range(RUN_AHEAD + 2)]
        self._copied = [_event() for _ in self.buffers]
        self._turn = 0

    def room(self, size: int) -> Batch | None:
        """Return room for `size` samples; None without buffers.

        Waits for the copy from it, where that has not ended.
        """
        if not self.buffers:
            return None
        self._turn = (self._turn + 1) % len(self.buffers)
        self._copied[self._turn].synchronize()
        inputs, targets = self.buffers[self._turn]
        return inputs[:size], targets[:size]

    def mark(self) -> None:
        """Tell that the copy from the last room is queued on the current stream."""
        if self.buffers:
            self._copied[self._turn].record()


class Copies:
    """Copies batches to the device of `compute`; their times go to `times` if it is given."""

    def __init__(
        self, split: Split, config: RunConfig, compute: Compute, times: DeviceTimes | None
    ) -> None:
        self._compute = compute
        self._times = times
        self._non_blocking = config.non_blocking
        self.ring = PinnedRing(split, config, compute)
        self.stream: torch.cuda.Stream | None = None
        if config.copy_stream and compute.on_gpu:
            self.stream = torch.cuda.Stream(compute.device)  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def room(self, size: int) -> Batch | None:
        """Return page-locked memory to gather `size` samples in, if there is any."""
        return self.ring.room(size)

    def send(self, batch: Batch) -> Batch:
        """Return the batch on the device, for work on the current stream."""
        if not self._compute.on_gpu:
            return batch
        if self.stream is None:
            return self._copy(batch)
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream):
            moved = self._copy(batch)
            self._arrived.record()
        computing.wait_event(self._arrived)
        for part in moved:
            # The memory belongs to the side stream, which must not use it again too early.
            part.record_stream(computing)
        return moved

    def _copy(self, batch: Batch) -> Batch:
        pair = self._times.begin_copy() if self._times is not None else None
        moved = _to(batch, self._compute.device, self._non_blocking)
        self.ring.mark()
        if self._times is not None:
            self._times.end_copy(pair)
        return moved


def _to(batch: Batch, device: torch.device, non_blocking: bool) -> Batch:
    inputs, targets = batch
    return (
        inputs.to(device, non_blocking=non_blocking),
        targets.to(device, non_blocking=non_blocking),
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
