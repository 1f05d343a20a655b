"""Batches from worker processes: torch's DataLoader, one call of `Split.take` a batch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.config import RunConfig
from trainer.error_messages import RunFailedError
from trainer.parent_death_signal import set_parent_death_signal
from trainer.workloads.task import Batch, Split


class WorkerPool:
    """`num_workers` processes that load batches ahead, `prefetch_factor` each.

    Persistent ones live until `close`; others are started anew for each order and end with it.
    Each batch has random numbers of its own, which do not depend on the worker that loads it.
    """

    def __init__(self, split: Split, config: RunConfig) -> None:
        self._order = _BatchOrder(config.batch_size, config.seed)
        self._persistent = config.persistent_workers
        context = multiprocessing.get_context("forkserver")
        # Imported once by the fork server, so that workers start in milliseconds. Its own group
        # comes first: importing torch takes seconds.
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
            generator=torch.Generator(),  # its own: the default one belongs to the model
        )
        self._fetched: Any = None

    def batches(self, order: Tensor, epoch: int = 0) -> Iterator[Batch]:
        """Yield the samples of `order` in batches on the host, in this order.

        A split that draws random numbers draws others in each epoch, and the same ones when a run
        is resumed: `order` is then the rest of the epoch's.
        Workers that are not persistent end with the iterator, at its end or when it is dropped.
        Raises RuntimeError at most five seconds after a worker has died, and RunFailedError if the
        split does.
        """
        assert self._loader is not None
        self._order.indices, self._order.epoch = order, epoch
        _start_fork_server()
        self._fetched = iter(self._loader)
        try:
            while (batch := _next(self._fetched)) is not None:
                yield batch
        finally:
            if not self._persistent:
                self._end()

    def close(self) -> None:
        """End the workers."""
        self._loader = None
        self._end()

    def _end(self) -> None:
        # Not left to the garbage collector: a failure that is kept keeps the iterator as well.
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched._shutdown_workers()


class _SplitDataset(Dataset[Batch]):
    """Gives whole batches to a worker: the seed and the indices of one batch are one call."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return self._split.length

    def __getitems__(self, seed_and_indices: list[int]) -> Batch | RunFailedError:
        seed, *indices = seed_and_indices
        _seed(seed)
        try:
            return self._split.take(torch.tensor(indices))
        except RunFailedError as failure:
            return failure  # raised, it would come with the worker's traceback for a sentence


class _BatchOrder(Sampler[list[int]]):
    """The batches of the current epoch, each as a seed and a list of indices."""

    def __init__(self, batch_size: int, seed: int) -> None:
        self._batch_size = batch_size
        self._seed = seed
        self.indices = torch.empty(0, dtype=torch.int64)
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        left = len(self.indices)  # numbers a batch from the epoch's end, also in a resumed run
        for indices in in_batches(self.indices, self._batch_size):
            seeds = np.random.SeedSequence((self._seed, self.epoch, left))
            yield [int(seeds.generate_state(1)[0]), *indices.tolist()]
            left -= len(indices)

    def __len__(self) -> int:
        return -(-len(self.indices) // self._batch_size)


def _seed(seed: int) -> None:
    """Seed what a split may draw random numbers from, with 32 bits.

    torch itself seeds a worker once, when it starts.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def in_batches(order: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return the order in parts of `size`; the last may be smaller."""
    # torch splits nothing into one empty batch; a run resumed at an epoch's end has nothing left.
    return torch.split(order, size) if len(order) else ()


def _next(batches: Iterator[Batch | RunFailedError]) -> Batch | None:
    try:
        batch = next(batches, None)
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        if str(error).startswith("Caught "):  # torch's first word on what a worker raised itself
            raise
        # A batch lies in shared memory that is asked of the worker which made it.
        raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from error
    except RuntimeError as error:
        if str(error).startswith("Pin memory thread exited"):  # asked a worker that has died
            raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from error
        raise
    if isinstance(batch, RunFailedError):
        raise batch
    return batch


def _as_is(batch: Any) -> Any:
    return batch


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _start_fork_server() -> None:
    """Start the fork server, unless it runs, so that no signal to this process's group ends it.

    It leaves the group once Python runs in it (`fork_server.py`); until then they are blocked.
    """
    multiprocessing.resource_tracker.ensure_running()  # itself it would unblock them again
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_with_trainer(_worker: int) -> None:
    """Let this worker end within a second of the process that trains, however that one ends.

    torch's workers only look whether the fork server is there, and each keeps it alive: it ends
    when neither the trainer nor a worker has the other end of its pipe.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    set_parent_death_signal()  # the fork server; torch itself looks every five seconds
    threading.Thread(target=_wait_for_trainer, name="stepscope-parent", daemon=True).start()


def _wait_for_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(1)
