"""Feeds batches to the device: straight from RAM, or through worker processes.

All built-in data fit in RAM, so the fast way is one indexing call a batch in the training thread.
`num_workers` above 0 takes torch's DataLoader instead, to show what it costs and when it pays.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.spawn
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.config import RunConfig
from trainer.training.compute import RUN_AHEAD, Compute
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
            # Before batch n is gathered, Compute.pace has waited for step n - 1 - RUN_AHEAD: the
            # copies of the RUN_AHEAD steps since may be under way. One buffer more than needed.
            self.buffers = [split.room(size, pin_memory=True) for _ in range(RUN_AHEAD + 2)]

    def slot(self, turn: int, size: int) -> Batch | None:
        """Return room for `size` samples, for batch number `turn` of an epoch; None if empty."""
        if not self.buffers:
            return None
        inputs, targets = self.buffers[turn % len(self.buffers)]
        return inputs[:size], targets[:size]


class MemoryLoader:
    """Batches by one indexing call, on a GPU through page-locked buffers."""

    def __init__(self, split: Split, config: RunConfig, compute: Compute) -> None:
        self._split = split
        self._batch_size = config.batch_size
        self._compute = compute
        self._non_blocking = config.non_blocking
        self._ring = PinnedRing(split, config, compute)

    def batches(self, order: Tensor) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller.

        The caller paces every batch. Before it asks for a second order it waits for the device,
        because that order begins with the first buffer again.
        """
        for turn, indices in enumerate(_batches(order, self._batch_size)):
            batch = self._split.take(indices, out=self._ring.slot(turn, len(indices)))
            yield _to(batch, self._compute, self._non_blocking)

    def close(self) -> None:
        """Do nothing: the buffers are freed with the loader, which a failure may keep alive."""


class WorkerLoader:
    """Batches from DataLoader workers, which live for the whole run.

    They are pinned here and not by the DataLoader, which frees each batch after its step. With
    `pin_memory` on a GPU this costs the training thread one copy of every batch on the host.
    """

    def __init__(self, split: Split, config: RunConfig, compute: Compute) -> None:
        self._order = _BatchOrder(config.batch_size)
        self._compute = compute
        self._non_blocking = config.non_blocking
        self._ring = PinnedRing(split, config, compute)
        context = multiprocessing.get_context("forkserver")
        # Imported once by the fork server, so that workers start in milliseconds.
        context.set_forkserver_preload(["trainer.training.data"])
        self._loader: DataLoader[Batch] | None = DataLoader(
            _SplitDataset(split),
            batch_sampler=self._order,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context=context,
            collate_fn=_as_is,
            generator=torch.Generator(),  # its own: the default one belongs to the model
        )

    def batches(self, order: Tensor) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the device; the last may be smaller.

        Raises RuntimeError at most five seconds after a worker has died. The caller paces and waits
        as with MemoryLoader.
        """
        assert self._loader is not None
        self._order.indices = order
        with _without_main():
            fetched = iter(self._loader)
        for turn in itertools.count():
            batch = _next(fetched)
            if batch is None:
                return
            slot = self._ring.slot(turn, len(batch[1]))
            if slot is not None:
                batch = slot[0].copy_(batch[0]), slot[1].copy_(batch[1])
            yield _to(batch, self._compute, self._non_blocking)

    def close(self) -> None:
        """End the workers; the buffers are freed with the loader, as with MemoryLoader."""
        loader, self._loader = self._loader, None
        if loader is not None and loader._iterator is not None:
            # Not left to the garbage collector: a failure that is kept keeps the iterator as well.
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


Loader = MemoryLoader | WorkerLoader


def make_loader(split: Split, config: RunConfig, compute: Compute) -> Loader:
    """Return the loader that `config.num_workers` asks for."""
    kind = WorkerLoader if config.num_workers else MemoryLoader
    return kind(split, config, compute)


class _SplitDataset(Dataset[Batch]):
    """Gives whole batches to a worker: the list of indices of one batch is one call."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return self._split.length

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._split.take(torch.tensor(indices))


class _BatchOrder(Sampler[list[int]]):
    """The batches of the current epoch, as lists of indices."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.indices = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in _batches(self.indices, self._batch_size):
            yield indices.tolist()

    def __len__(self) -> int:
        return -(-len(self.indices) // self._batch_size)


def _next(batches: Iterator[Batch]) -> Batch | None:
    try:
        return next(batches, None)
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        # A batch lies in shared memory that is asked of the worker which made it.
        raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from error


def _batches(order: Tensor, size: int) -> tuple[Tensor, ...]:
    # torch splits nothing into one empty batch; a run resumed at an epoch's end has nothing left.
    return torch.split(order, size) if len(order) else ()


def _as_is(batch: Any) -> Any:
    return batch


def _to(batch: Batch, compute: Compute, non_blocking: bool) -> Batch:
    if not compute.on_gpu:
        return batch
    inputs, targets = batch
    return (
        inputs.to(compute.device, non_blocking=non_blocking),
        targets.to(compute.device, non_blocking=non_blocking),
    )


_patching = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Start child processes that do not run the parent's main script again.

    multiprocessing re-imports `__main__` in every child. Under `streamlit run` that is the page,
    which would start the app once more in each worker. Our workers need nothing from it.
    """
    spawn = multiprocessing.spawn
    with _patching:
        original = spawn.get_preparation_data

        def prepare(name: str) -> dict[str, Any]:
            data = original(name)
            data.pop("init_main_from_path", None)
            data.pop("init_main_from_name", None)
            return data

        spawn.get_preparation_data = prepare
        try:
            yield
        finally:
            spawn.get_preparation_data = original
