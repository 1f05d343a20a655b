"""Loads batches and copies them to the device, in one of three ways.

- `num_workers` 0 (`Loader`): the training thread indexes or decodes each batch.
- `num_workers` above 0 (`Loader` with a `WorkerPool`): processes load batches in parallel;
  validation data in memory use no workers.
- `dataset_on_device` (`on_device`): copies a dataset in memory to the GPU once and indexes it
  there. On a CPU (`CachedDataset`) decoded samples stay in memory after the first epoch.

Copies to a GPU use pinned memory with `pin_memory`, do not block the host with `non_blocking`, and
run on a side stream with `copy_stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import psutil
import torch
from torch import Tensor

from stepscope.common.formatting import format_bytes
from trainer.config import RunConfig
from trainer.errors import RunFailedError
from trainer.training.accelerator import Accelerator, CudaAccelerator, CudaStepTimer
from trainer.training.worker_pool import WorkerPool, in_batches
from trainer.workloads.task import Batch, Split, TensorSplit, empty_batch


class Loader:
    """Loads batches: in the calling thread, or in `num_workers` processes."""

    def __init__(
        self,
        split: Split,
        config: RunConfig,
        compute: Accelerator,
        times: CudaStepTimer | None = None,
    ) -> None:
        self._split = split
        self._batch_size = config.batch_size
        self._indexed_on = split.inputs.device if isinstance(split, TensorSplit) else "cpu"
        self._workers = WorkerPool(split, config) if config.num_workers else None
        self._copies = HostToDeviceCopier(config, compute, times)

    def batches(self, order: Tensor) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller.

        Raises RunFailedError for a batch without a sample per index, and RuntimeError if a worker
        has died.
        """
        asked = in_batches(order.to(self._indexed_on), self._batch_size)
        if self._workers is None:
            taken = (self._split.take(indices) for indices in asked)
        else:
            taken = self._workers.batches(order)  # type: ignore[assignment]
        for indices, batch in zip(asked, taken, strict=True):
            if len(batch[1]) != len(indices):
                raise RunFailedError(
                    f"A batch has {len(batch[1]):,} of {len(indices):,} samples. Return one sample "
                    "per index from Split.take."
                )
            yield self._copies.send(batch)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class HostToDeviceCopier:
    """Copies batches to the device; no-op on a CPU."""

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
        """Return the batch on the device, for use on the current stream."""
        if not self._compute.on_gpu:
            return batch
        if self._pin_memory:
            # No-op for batches of workers, which DataLoader's thread has pinned.
            batch = batch[0].pin_memory(), batch[1].pin_memory()
            # Raises for a failed GPU, where freeing pinned memory would abort the process.
            torch.cuda.current_stream().query()
            self._sent = batch  # frees the previous batch
        if self.stream is None:
            return self._copy(batch)
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream):
            moved = self._copy(batch)
            self._arrived.record()
        computing.wait_event(self._arrived)
        for part in moved:  # the side stream must not reuse this memory too early
            part.record_stream(computing)
        return moved

    def _copy(self, batch: Batch) -> Batch:
        with nullcontext() if self._times is None else self._times.copy():
            return _to(batch, self._compute.device, self._non_blocking)


def _to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    inputs, targets = (part.to(device, non_blocking=non_blocking) for part in batch)
    return inputs, targets


def on_device(split: Split, compute: CudaAccelerator) -> TensorSplit:
    """Copy a dataset to the GPU. Raises RunFailedError if it is not in memory."""
    if not isinstance(split, TensorSplit):
        raise RunFailedError(
            "dataset_on_device: this workload's data is not in memory. Turn off dataset_on_device."
        )
    inputs, targets = _to((split.inputs, split.targets), compute.device)
    return replace(split, inputs=inputs, targets=targets)


class CachedDataset:
    """Caches the samples of a deterministic split, such as image files."""

    def __init__(self, split: Split) -> None:
        """Allocate all samples. Raises RunFailedError if the host lacks memory."""
        self._split = split
        self.length = split.length
        # Untouched pages take no memory.
        self._inputs, self._targets = empty_batch(split, split.length)
        needed = self._inputs.nbytes + self._targets.nbytes
        free = psutil.virtual_memory().available
        if needed > free:
            raise RunFailedError(
                f"dataset_on_device: the decoded dataset takes {format_bytes(needed)}, but "
                f"the host has {format_bytes(free)} free. Switch off dataset_on_device."
            )
        self._cached = torch.zeros(split.length, dtype=torch.bool)

    def take(self, indices: Tensor) -> Batch:
        missing = indices[~self._cached[indices]]
        if len(missing):
            self._inputs[missing], self._targets[missing] = self._split.take(missing)
            self._cached[missing] = True
        return self._inputs.index_select(0, indices), self._targets.index_select(0, indices)


def make_loader(
    split: Split, config: RunConfig, compute: Accelerator, *, validation: bool = False
) -> Loader:
    """Return the loader of a split; copies for validation are not timed."""
    times = None if validation else compute.times
    if config.dataset_on_device:
        if isinstance(compute, CudaAccelerator):
            split, times = on_device(split, compute), None
            config = replace(config, num_workers=0, pin_memory=False, copy_stream=False)
        else:
            split = CachedDataset(split)
    if validation and isinstance(split, TensorSplit):
        config = replace(config, num_workers=0)
    return Loader(split, config, compute, times)
