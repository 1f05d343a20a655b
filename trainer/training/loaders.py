"""Feeds batches to the device, in one of three ways.

- `num_workers` 0 (`InMemoryLoader`): the training thread gathers each batch itself. For data that
  lie in memory this is the fast way: one indexing call a batch. Data that have to be decoded are
  decoded by the training thread too, and the GPU waits for it. With `pin_memory` that thread copies
  each batch into page-locked memory, as a DataLoader without workers does.
- `num_workers` above 0 (`WorkerLoader`): processes gather or decode batches beside the training,
  and the training thread takes them from shared memory. With `pin_memory` a thread of the
  DataLoader copies each into page-locked memory. Validation data that lie in memory are gathered
  without workers.
- `dataset_on_device` (`DeviceLoader`): data that lie in memory are copied to the GPU once, before
  the first step, and gathered there. Only the order of the samples is copied, once an epoch. On
  a CPU (`CachedDataset`) the samples that the training thread decodes in the first epoch are kept.

How a batch of the first two comes to a GPU is in `h2d_copy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from stepscope.common.formatting import format_bytes
from trainer.config import RunConfig
from trainer.error_messages import RunFailedError
from trainer.training.accelerator import Accelerator, CudaAccelerator
from trainer.training.cached_dataset import CachedDataset
from trainer.training.cuda_timing import CudaStepTimer
from trainer.training.h2d_copy import HostToDeviceCopier
from trainer.training.worker_pool import WorkerPool, in_batches
from trainer.workloads.task import Batch, Split, TensorSplit


class InMemoryLoader:
    """Batches gathered by the calling thread."""

    def __init__(
        self,
        split: Split,
        config: RunConfig,
        compute: Accelerator,
        times: CudaStepTimer | None = None,
    ) -> None:
        self._split = split
        self._batch_size = config.batch_size
        self._copies = HostToDeviceCopier(config, compute, times)

    def batches(self, order: Tensor, epoch: int = 0) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller.

        A split may leave samples out, so any batch may be smaller and even empty. Raises
        RunFailedError if all of an epoch are. Random numbers that a split draws here are those of
        the calling thread's process, which a checkpoint holds; workers draw theirs by `epoch`.
        """
        taken = (self._split.take(indices) for indices in in_batches(order, self._batch_size))
        for batch in _checked(taken, order, self._split, self._batch_size):
            yield self._copies.send(batch)

    def close(self) -> None:
        """Do nothing: there are no workers."""


class WorkerLoader:
    """Batches from worker processes."""

    def __init__(
        self,
        split: Split,
        config: RunConfig,
        compute: Accelerator,
        times: CudaStepTimer | None = None,
    ) -> None:
        self._split = split
        self._batch_size = config.batch_size
        self._workers = WorkerPool(split, config)
        self._copies = HostToDeviceCopier(config, compute, times)

    def batches(self, order: Tensor, epoch: int = 0) -> Iterator[Batch]:
        """Yield batches as MemoryLoader does. Raises RuntimeError when a worker has died."""
        fetched = self._workers.batches(order, epoch)
        for batch in _checked(fetched, order, self._split, self._batch_size):
            yield self._copies.send(batch)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


class DeviceLoader:
    """Batches gathered on the GPU from a data set that was copied there once."""

    def __init__(self, split: Split, config: RunConfig, compute: CudaAccelerator) -> None:
        """Copy the data set. Raises RunFailedError if it is not one in memory, or does not fit."""
        self._batch_size = config.batch_size
        self._device = compute.device
        self._split = _moved(split, compute)

    def batches(self, order: Tensor, epoch: int = 0) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller."""
        for indices in in_batches(order.to(self._device), self._batch_size):
            yield self._split.take(indices)

    def close(self) -> None:
        """Do nothing: the data set is freed with the loader."""


Loader = InMemoryLoader | WorkerLoader | DeviceLoader


def make_loader(split: Split, config: RunConfig, compute: Accelerator) -> Loader:
    """Return the loader of the training data; see the module's text."""
    if config.dataset_on_device:
        return _resident(split, config, compute)
    kind = WorkerLoader if config.num_workers else InMemoryLoader
    return kind(split, config, compute, compute.times)


def make_validation_loader(split: Split, config: RunConfig, compute: Accelerator) -> Loader:
    """Return the loader of the validation data, whose copies are not part of any step."""
    if config.dataset_on_device:
        return _resident(split, config, compute)
    in_workers = config.num_workers and not isinstance(split, TensorSplit)
    return (WorkerLoader if in_workers else InMemoryLoader)(split, config, compute)


def _resident(split: Split, config: RunConfig, compute: Accelerator) -> Loader:
    """Return the loader of data that stay on the device once they are there."""
    if isinstance(compute, CudaAccelerator):
        return DeviceLoader(split, config, compute)
    ranks = config.devices_per_node if config.distributed else 1
    return InMemoryLoader(CachedDataset(split, ranks), config, compute, compute.times)


def _checked(batches: Iterator[Batch], order: Tensor, split: Split, size: int) -> Iterator[Batch]:
    """Pass batches on; raise RunFailedError in place of the last if a whole epoch has no sample."""
    count, found = -(-len(order) // size), 0
    for number, batch in enumerate(batches, 1):
        found += len(batch[1])
        if number == count and not found and len(order) == split.length:
            raise RunFailedError(
                f"None of the {len(order):,} samples could be loaded. Check the data."
            )
        yield batch


def _moved(split: Split, compute: CudaAccelerator) -> TensorSplit:
    if not isinstance(split, TensorSplit):
        raise RunFailedError(
            "dataset_on_device: this workload's data is not in memory. Turn off dataset_on_device."
        )
    parts = (split.inputs, split.targets)
    needed = sum(part.numel() * part.element_size() for part in parts)
    free, total = compute.free_memory()
    if needed > free:
        raise RunFailedError(
            f"dataset_on_device: the dataset needs {format_bytes(needed)}, but only "
            f"{format_bytes(free)} of the GPU's {format_bytes(total)} is free. Turn off "
            "dataset_on_device."
        )
    inputs, targets = (part.to(compute.device) for part in parts)
    return replace(split, inputs=inputs, targets=targets)
