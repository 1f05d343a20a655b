"""Batches from worker processes: torch's DataLoader with one call of `Split.take` per batch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stepscope.host.child_process import set_parent_death_signal
from trainer.config import RunConfig
from trainer.errors import RunFailedError
from trainer.workloads.task import Batch, Split


class WorkerPool:
    """`num_workers` processes that load `prefetch_factor` batches ahead."""

    def __init__(self, split: Split, config: RunConfig) -> None:
        self._batch_size = config.batch_size
        self._order: list[list[int]] = []  # the indices of the epoch's batches
        self._persistent = config.persistent_workers
        context = multiprocessing.get_context("forkserver")
        # The fork server imports these once, so that workers start in milliseconds; its process
        # group comes first, as importing torch takes seconds.
        context.set_forkserver_preload(
            ["trainer.training.fork_server", "trainer.training.worker_pool"]
        )
        self._loader: DataLoader[Batch] | None = DataLoader(
            _SplitDataset(split),
            batch_sampler=self._order,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            multiprocessing_context=context,
            collate_fn=_as_is,
            worker_init_fn=_end_with_trainer,
            # Of the workers' seeds; the default generator is for the model.
            generator=torch.Generator().manual_seed(config.seed),
        )
        self._fetched: Any = None

    def batches(self, order: Tensor) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the host.

        Raises RuntimeError within five seconds of a worker's end, and RunFailedError.
        """
        assert self._loader is not None
        self._order[:] = [batch.tolist() for batch in in_batches(order, self._batch_size)]
        _start_fork_server()
        self._fetched = iter(self._loader)
        try:
            while (batch := _next(self._fetched)) is not None:
                yield batch
        finally:
            if not self._persistent:
                self._end()

    def close(self) -> None:
        self._loader = None
        self._end()

    def _end(self) -> None:
        # Explicit, as an exception may keep the iterator alive.
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched._shutdown_workers()


class _SplitDataset(Dataset[Batch]):
    """Loads a whole batch per call."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return self._split.length

    def __getitems__(self, indices: list[int]) -> Batch | RunFailedError:
        try:
            return self._split.take(torch.tensor(indices))
        except RunFailedError as failure:
            return failure  # DataLoader would raise it with the worker's traceback as message


def in_batches(order: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return the order in batches of `size`; the last may be smaller."""
    # torch.split returns one empty batch for an empty order, as at the end of an epoch.
    return torch.split(order, size) if len(order) else ()


def _next(batches: Iterator[Batch | RunFailedError]) -> Batch | None:
    try:
        batch = next(batches, None)
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        if str(error).startswith("Caught "):  # raised by a worker
            raise
        # Opening a batch in shared memory needs the worker that made it.
        raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from error
    except RuntimeError as error:
        if str(error).startswith("Pin memory thread exited"):  # it needs a live worker as well
            raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from error
        raise
    if isinstance(batch, RunFailedError):
        raise batch
    return batch


def _as_is(batch: Any) -> Any:
    return batch


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _start_fork_server() -> None:
    """Start the fork server, with signals blocked until it has left this process group."""
    multiprocessing.resource_tracker.ensure_running()  # before: it would unblock the signals
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_with_trainer(_worker: int) -> None:
    """End this worker with the training process; DataLoader's workers poll the fork server only."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    set_parent_death_signal()
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, name="stepscope-parent", daemon=True).start()
