"""Hook the DataLoader: data wait, samples, passes over the data, and evaluation.

Batches fetched with gradients disabled are evaluation. So is a complete pass without a
`backward()`: many loops fetch outside of `torch.no_grad()`. Such a pass is reclassified at its end,
or before training data; a pass of one batch, which may be read ahead, at the next batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from importlib import import_module
from threading import get_ident
from types import ModuleType
from typing import Any

from stepscope.profiling.phase_ranges import DATA, FORWARD, span
from stepscope.session.code_sampler import VALIDATION
from stepscope.session.training_facts import LoaderFacts
from stepscope.tracker import batch_length
from stepscope.watch.hooks.epochs import DataPass
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace
from stepscope.watch.hooks.state import HookState

PASS = "_stepscope_pass"
START_S = "_stepscope_start_s"
"""Attribute of an iterator: seconds that beginning its pass took, until its first batch."""
MAX_LOADERS = 8
MAX_NESTED = 8  # data sets within data sets


class DataLoaderHook:
    """Wraps the iterators of all DataLoaders."""

    def __init__(self, torch: ModuleType, state: HookState) -> None:
        self._state = state
        self._guard = HookGuard("perf/data_wait, perf/samples_per_sec and train/epoch")
        self._grad_enabled = torch.is_grad_enabled
        self._fetching = False
        self._last = 0  # The `id` of the last iterator.
        self._pass: DataPass | None = None
        self._undecided: DataPass | None = None
        """A complete pass that may be training or evaluation."""
        self._passes = 0
        self._loaders: dict[tuple[type[Any], int], LoaderFacts] = {}
        self._iterable: type[Any] = import_module("torch.utils.data").IterableDataset
        for function in (self._fetched, self._ended):
            opaque(function, with_callees=True)

    def around_next(self, original: Function) -> Function:
        state = self._state
        training = state.training
        guard = self._guard
        grad_enabled = self._grad_enabled
        clock = time.perf_counter
        fetched = self._fetched

        def __next__(iterator: Any) -> Any:
            # A nested call is of a dataset that reads from another loader.
            if self._fetching or (get_ident() != state.thread and not state.claim()):
                return original(iterator)
            began_s = clock()
            self._fetching = True
            training.phase = DATA
            try:
                with span(DATA):
                    batch = original(iterator)
            except StopIteration:
                guard.call(self._ended, iterator, began_s)
                raise
            finally:
                self._fetching = False
                training.phase = FORWARD if grad_enabled() else VALIDATION
            guard.call(fetched, iterator, batch, began_s)
            return batch

        return __next__

    def around_iter(self, original: Function) -> Function:
        """Measure the start of a pass, as of its workers, which counts as data wait."""
        state = self._state
        clock = time.perf_counter

        def __iter__(loader: Any) -> Any:
            if self._fetching or (get_ident() != state.thread and not state.claim()):
                return original(loader)
            began_s = clock()
            state.training.phase = DATA
            iterator = original(loader)
            with contextlib.suppress(AttributeError):  # of a loader that is not torch's
                iterator.__dict__[START_S] = clock() - began_s
            return iterator

        return __iter__

    def _fetched(self, iterator: Any, batch: Any, began_s: float) -> None:
        state, times = self._state, self._state.times
        number = iterator._num_yielded
        current = self._pass
        state.recorder.activity += 1
        state.session.readings.read_if_requested()
        # The workers' iterator may continue with the next pass after a `break`.
        if current is None or id(iterator) != self._last or number == 1 or number > current.until:
            current = self._turn_to(iterator, began_s)
        state.session.oom.batches.add(current.order, times.backwards, state.stepped)
        now_s = time.perf_counter()
        start_s = iterator.__dict__.pop(START_S, 0.0)
        wait_s = now_s - began_s + start_s
        if not self._grad_enabled():
            times.exclude(began_s, now_s)
            return
        if times.evaluation is not None:
            times.exclude(began_s, began_s)  # also the time since the evaluation's last batch
            times.close_evaluation()
        current.batches += 1
        if number == current.until:
            current.ended_s = now_s
            if self._undecided is None:  # the loader may never end
                self._undecided = current
        times.data_wait_s += wait_s
        times.phases.mark_s = now_s
        loader = current.loader
        if number == 1:
            self._describe_loader(loader, batch)
            loader.passes += 1
            loader.start_s += wait_s
        else:
            loader.batches += 1
            loader.wait_s += wait_s
        state.learning.batch_fetched(batch, number)
        size = current.batch_size
        rows = min(size, current.rows - size * (number - 1)) if size else batch_length(batch) or 0
        times.feed.put(current, rows)

    def _turn_to(self, iterator: Any, began_s: float) -> DataPass:
        """Return the pass of another iterator, or the next pass of the same iterator."""
        waiting, number = self._undecided, iterator._num_yielded
        self._last = id(iterator)
        current: DataPass | None = iterator.__dict__.get(PASS)
        if current is None or number == 1 or number > current.until:
            dataset = id(iterator._dataset)
            if waiting is not None and (waiting.ended or waiting.dataset == dataset):
                self._classify(waiting)
            length, size, rows = _length_of_pass(iterator)
            self._passes += 1
            current = DataPass(
                order=self._passes,
                dataset=dataset,
                began_s=began_s,
                ended_s=began_s,
                loader=self._loader_facts(iterator),
                length=length,
                is_finite=length < math.inf
                or (
                    hasattr(type(iterator._dataset), "__len__")
                    and hasattr(type(iterator._index_sampler), "__len__")
                ),
                until=number - 1 + length,
                batch_size=size,
                rows=size * (number - 1) + rows,
                backwards=self._state.times.backwards,
                stepped=self._state.stepped,
                data_wait_s=self._state.times.data_wait_s,
            )
            iterator.__dict__[PASS] = current
        self._pass = current
        return current

    def _ended(self, iterator: Any, began_s: float) -> None:
        times, now_s = self._state.times, time.perf_counter()
        self._last = 0
        current: DataPass | None = iterator.__dict__.pop(PASS, None)
        if current is None:  # an empty loader
            return
        if not self._grad_enabled():
            times.exclude(began_s, now_s)
            return
        times.data_wait_s += now_s - began_s
        current.loader.start_s += now_s - began_s  # the end of its workers
        current.ended = True
        current.ended_s = now_s
        waiting = self._undecided
        if waiting is not None and waiting.ended and waiting is not current:
            self._classify(waiting)
        if current.batches > 1 or times.backwards > current.backwards:
            self._classify(current)
        else:
            self._undecided = current

    def _loader_facts(self, iterator: Any) -> LoaderFacts:
        """Return the facts of the loaders of one class of data set and number of workers."""
        dataset = iterator._dataset
        workers = iterator._num_workers
        # A script may make a new loader, with a new data set, for each pass.
        key = type(dataset), workers
        found = self._loaders.get(key)
        if found is None:
            found = self._loaders[key] = LoaderFacts(
                is_map=not isinstance(dataset, self._iterable),
                dataset=type(dataset).__name__,
                in_memory=is_in_memory(dataset),
                workers=workers,
                persistent=bool(getattr(iterator, "_persistent_workers", False)),
            )
            listed = self._state.session.observer.facts.loaders
            if len(listed) < MAX_LOADERS:
                listed.append(found)
        return found

    def _describe_loader(self, loader: LoaderFacts, batch: Any) -> None:
        """Add the size of the first batch of a loader."""
        if not loader.passes:
            parts = batch.values() if isinstance(batch, dict) else batch
            tensors = parts if isinstance(batch, (list, tuple, dict)) else (batch,)
            loader.batch_bytes = sum(int(getattr(one, "nbytes", 0)) for one in tensors)
            loader.batch_size = batch_length(batch) or 0

    def _classify(self, whole: DataPass) -> None:
        times = self._state.times
        if self._undecided is whole:
            self._undecided = None
        if whole.is_classified:
            return
        if times.backwards > whole.backwards:
            times.feed.close(whole)
        else:
            times.exclude(whole.began_s, whole.ended_s)
            times.feed.drop(whole)
            if self._state.stepped == whole.stepped:
                times.data_wait_s = whole.data_wait_s
        whole.is_classified = True


def is_in_memory(dataset: Any) -> bool:
    """Return True for tensors and lists, and for parts of them, by the classes of torch."""
    for _ in range(MAX_NESTED):
        name = type(dataset).__name__
        if name == "ConcatDataset" and dataset.datasets:
            dataset = dataset.datasets[0]
        elif name == "Subset":
            dataset = dataset.dataset
        else:
            return name == "TensorDataset" or isinstance(dataset, (list, tuple))
    return False


def _length_of_pass(iterator: Any) -> tuple[float, int, int]:
    """Return the batches of a pass, infinite if unknown, its batch size and samples, 0 if unknown.

    Calls no `len` of the script's samplers, which may draw random numbers. A sampler without a
    length repeats another one, without end (ultralytics, timm).
    """
    sampler = iterator._index_sampler
    with contextlib.suppress(Exception):  # neither the sampler nor the data set needs a length
        if not hasattr(type(sampler), "__len__"):
            sampler = sampler.sampler
        if _has_torchs_length(sampler) and _has_torchs_length(getattr(sampler, "sampler", ())):
            length = max(1, len(sampler))
            if type(sampler).__iter__ is import_module("torch.utils.data").BatchSampler.__iter__:
                return length, sampler.batch_size, len(sampler.sampler)
            return length, 0, 0
    return math.inf, 0, 0


def _has_torchs_length(sampler: Any) -> bool:
    """Return True if the length is computed by torch, or is that of a list."""
    return getattr(type(sampler).__len__, "__module__", "torch.").startswith("torch.")


def attach(torch: ModuleType, state: HookState) -> None:
    """Wrap the `__next__` that all iterators share."""
    module = import_module("torch.utils.data.dataloader")
    batches = DataLoaderHook(torch, state)
    replace(module._BaseDataLoaderIter, "__next__", batches.around_next, traced=False)
    replace(module.DataLoader, "__iter__", batches.around_iter, traced=False)
