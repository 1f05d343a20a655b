"""Loads batches and copies them to the device, in one of three ways.

- `num_workers` 0 (`HostLoader`): the training thread gathers or decodes each batch. For data in
  memory this is fast: one indexing call a batch.
- `num_workers` above 0 (`HostLoader` with a `WorkerPool`): processes load batches beside the
  training. Validation data in memory are gathered without workers.
- `dataset_on_device` (`DeviceLoader`): data in memory are copied to the GPU once and gathered
  there. On a CPU (`CachedDataset`) decoded samples are kept after the first epoch.

To a GPU a batch is copied from page-locked memory with `pin_memory`, without the host waiting for
it with `non_blocking`, and with `copy_stream` on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psutil
import torch
from torch import Tensor

from stepscope.common.formatting import format_bytes
from trainer.config import RunConfig
from trainer.error_messages import RunFailedError
from trainer.training.accelerator import Accelerator, CudaAccelerator
from trainer.training.cuda_timing import CudaStepTimer
from trainer.training.worker_pool import WorkerPool, in_batches
from trainer.workloads.task import Batch, Split, TensorSplit


class HostLoader:
    """Batches gathered on the host: by the calling thread, or by `num_workers` processes."""

    def __init__(
        self,
        split: Split,
        config: RunConfig,
        compute: Accelerator,
        times: CudaStepTimer | None = None,
    ) -> None:
        """The times of the copies go to `times`."""
        self._split = split
        self._batch_size = config.batch_size
        self._workers = WorkerPool(split, config) if config.num_workers else None
        self._copies = HostToDeviceCopier(config, compute, times)

    def batches(self, order: Tensor, epoch: int = 0) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller.

        A split may leave samples out, so any batch may be smaller and even empty. Raises
        RunFailedError if all of an epoch are, and RuntimeError when a worker has died. Random
        numbers that a split draws in the calling thread are those of the process, which a
        checkpoint holds; workers draw theirs by `epoch`.
        """
        if self._workers is None:
            taken = (self._split.take(part) for part in in_batches(order, self._batch_size))
        else:
            taken = self._workers.batches(order, epoch)  # type: ignore[assignment]
        count, found = -(-len(order) // self._batch_size), 0
        for number, batch in enumerate(taken, 1):
            found += len(batch[1])
            if number == count and not found and len(order) == self._split.length:
                raise RunFailedError(
                    f"None of the {len(order):,} samples could be loaded. Check the data."
                )
            yield self._copies.send(batch)

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()


class HostToDeviceCopier:
    """Copies batches to the device of `compute`; on a CPU it returns them unchanged."""

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


def _to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    inputs, targets = (part.to(device, non_blocking=non_blocking) for part in batch)
    return inputs, targets


class DeviceLoader:
    """Batches gathered on the GPU from a data set that was copied there once."""

    def __init__(self, split: Split, config: RunConfig, compute: CudaAccelerator) -> None:
        """Copy the data set. Raises RunFailedError if it is not one in memory, or does not fit."""
        if not isinstance(split, TensorSplit):
            raise RunFailedError(
                "dataset_on_device: this workload's data is not in memory. Turn off "
                "dataset_on_device."
            )
        needed = split.inputs.nbytes + split.targets.nbytes
        free, total = compute.free_memory()
        if needed > free:
            raise RunFailedError(
                f"dataset_on_device: the dataset needs {format_bytes(needed)}, but only "
                f"{format_bytes(free)} of the GPU's {format_bytes(total)} is free. Turn off "
                "dataset_on_device."
            )
        self._batch_size = config.batch_size
        self._device = compute.device
        inputs, targets = _to((split.inputs, split.targets), compute.device)
        self._split = replace(split, inputs=inputs, targets=targets)

    def batches(self, order: Tensor, epoch: int = 0) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller."""
        for indices in in_batches(order.to(self._device), self._batch_size):
            yield self._split.take(indices)

    def close(self) -> None:
        """Do nothing: the data set is freed with the loader."""


class CachedDataset:
    """A split that takes each sample from another split once and keeps it in host memory.

    The other split gives the same sample each time, and one for each index, as images in files do.
    """

    def __init__(self, split: Split, ranks: int = 1) -> None:
        """Make room for all samples, as each of so many ranks on this host does.

        Raises RunFailedError if the host has less memory than that.
        """
        self._split = split
        self.length = split.length
        inputs, targets = split.room(1)
        needed = split.length * (inputs.nbytes + targets.nbytes)
        free = psutil.virtual_memory().available
        if needed * ranks > free:
            each = f" in each of {ranks} processes" if ranks > 1 else ""
            raise RunFailedError(
                f"dataset_on_device: the decoded data set takes {format_bytes(needed)}{each}, and "
                f"{format_bytes(free)} of the host's memory are available. "
                "Switch off dataset_on_device."
            )
        self._inputs, self._targets = split.room(split.length)  # pages come as they are written
        self._kept = torch.zeros(split.length, dtype=torch.bool)

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch."""
        missing = indices[~self._kept[indices]]
        if len(missing):
            self._inputs[missing], self._targets[missing] = self._split.take(missing)
            self._kept[missing] = True
        return self._inputs.index_select(0, indices), self._targets.index_select(0, indices)

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch of `size` samples."""
        return self._split.room(size)


Loader = HostLoader | DeviceLoader


def make_loader(
    split: Split, config: RunConfig, compute: Accelerator, *, validation: bool = False
) -> Loader:
    """Return the loader of training or validation data; copies for validation are not timed."""
    times = None if validation else compute.times
    if config.dataset_on_device:
        if isinstance(compute, CudaAccelerator):
            return DeviceLoader(split, config, compute)
        split = CachedDataset(split, config.devices_per_node if config.distributed else 1)
    if validation and isinstance(split, TensorSplit):
        config = replace(config, num_workers=0)
    return HostLoader(split, config, compute, times)
