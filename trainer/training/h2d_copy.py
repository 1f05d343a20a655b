"""The way of a batch from the host to the device. On a CPU there is none: the batch stays.

On a GPU the batch is copied, from page-locked memory with `pin_memory`, without the host waiting
for it with `non_blocking`, and with `copy_stream` on a stream beside that of the computing. The
host is up to two steps ahead of the GPU (`Compute.pace`), so there a copy runs while the steps
before it are computed.
"""

from __future__ import annotations

import torch

from trainer.config import RunConfig
from trainer.training.accelerator import Accelerator
from trainer.training.cuda_timing import CudaStepTimer
from trainer.workloads.task import Batch


class HostToDeviceCopier:
    """Copies batches to the device of `compute`; their times go to `times` if it is given."""

    def __init__(
        self, config: RunConfig, compute: Accelerator, times: CudaStepTimer | None
    ) -> None:
        self._compute = compute
        self._times = times
        self._pin_memory = config.pin_memory
        self._non_blocking = config.non_blocking
        self._sent: Batch | None = None
        self.stream: torch.cuda.Stream | None = None
        if config.copy_stream and compute.on_gpu:
            self.stream = torch.cuda.Stream(compute.device)  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> Batch:
        """Return the batch on the device, for work on the current stream."""
        if not self._compute.on_gpu:
            return batch
        if self._pin_memory:
            # Does nothing to batches of workers, which DataLoader's thread has pinned.
            batch = batch[0].pin_memory(), batch[1].pin_memory()
            # Freeing pinned memory records an event, and a GPU that has failed would end the
            # process there. Asked first, it raises.
            torch.cuda.current_stream().query()
            self._sent = batch  # frees the one before
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
        if self._times is not None:
            self._times.end_copy(pair)
        return moved


def _to(batch: Batch, device: torch.device, non_blocking: bool) -> Batch:
    inputs, targets = batch
    return (
        inputs.to(device, non_blocking=non_blocking),
        targets.to(device, non_blocking=non_blocking),
    )
