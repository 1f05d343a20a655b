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

from stepscope.profiling.phase_ranges import DATA, span
from stepscope.tracker import batch_length
from stepscope.watch.hooks.epochs import BatchTracker, DataPass
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace
from stepscope.watch.hooks.state import HookState

PASS = "_stepscope_pass"
EVENTS_AT_ONCE, EVENT_EVERY_S = 50, 1.0
"""Number of epochs that all have an event, and minimum interval between later events."""


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
        self._event_s = 0.0
        for function in (self._fetched, self._ended):
            opaque(function, with_callees=True)

    def around_next(self, original: Function) -> Function:
        state, guard, clock, fetched = self._state, self._guard, time.perf_counter, self._fetched

        def __next__(iterator: Any) -> Any:
            # A nested call is of a dataset that reads from another loader.
            if self._fetching or (get_ident() != state.thread and not state.claim()):
                return original(iterator)
            began_s = clock()
            self._fetching = True
            try:
                with span(DATA):
                    batch = original(iterator)
            except StopIteration:
                guard.call(self._ended, iterator, began_s)
                raise
            finally:
                self._fetching = False
            guard.call(fetched, iterator, batch, began_s)
            return batch

        return __next__

    def _fetched(self, iterator: Any, batch: Any, began_s: float) -> None:
        state, number, current = self._state, iterator._num_yielded, self._pass
        state.recorder.activity += 1
        state.session.readings.look()
        # The workers' iterator may continue with the next pass after a `break`.
        if current is None or id(iterator) != self._last or number == 1 or number > current.until:
            current = self._turn_to(iterator, began_s)
        now_s = time.perf_counter()
        if not self._grad_enabled():
            state.exclude(began_s, now_s)
            return
        if state.evaluation is not None:
            state.exclude(began_s, began_s)  # also the time since the evaluation's last batch
            state.close_evaluation()
        current.batches += 1
        if number == current.until:
            current.ended_s = now_s
            if self._undecided is None:  # the loader may never end
                self._undecided = current
        state.data_wait_s += now_s - began_s
        if state.phases is not None:
            state.phases.mark_s = now_s
        size = current.batch_size
        rows = min(size, current.rows - size * (number - 1)) if size else batch_length(batch) or 0
        state.feed.put(current, rows)

    def _turn_to(self, iterator: Any, began_s: float) -> DataPass:
        """Return the pass of another iterator, or the next pass of the same iterator."""
        state, waiting, number = self._state, self._undecided, iterator._num_yielded
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
                length=length,
                is_finite=length < math.inf
                or (
                    hasattr(type(iterator._dataset), "__len__")
                    and hasattr(type(iterator._index_sampler), "__len__")
                ),
                until=number - 1 + length,
                batch_size=size,
                rows=size * (number - 1) + rows,
                backwards=state.backwards,
                stepped=state.stepped,
                data_wait_s=state.data_wait_s,
            )
            iterator.__dict__[PASS] = current
        self._pass = current
        return current

    def _ended(self, iterator: Any, began_s: float) -> None:
        state, now_s = self._state, time.perf_counter()
        self._last = 0
        current: DataPass | None = iterator.__dict__.pop(PASS, None)
        if current is None:  # an empty loader
            return
        if not self._grad_enabled():
            state.exclude(began_s, now_s)
            return
        state.data_wait_s += now_s - began_s
        current.ended, current.ended_s = True, now_s
        waiting = self._undecided
        if waiting is not None and waiting.ended and waiting is not current:
            self._classify(waiting)
        if current.batches > 1 or state.backwards > current.backwards:
            self._classify(current)
        else:
            self._undecided = current

    def _classify(self, whole: DataPass) -> None:
        state = self._state
        if self._undecided is whole:
            self._undecided = None
        if whole.judged:
            return
        if state.backwards > whole.backwards:
            state.feed.close(whole)
        else:
            state.exclude(whole.began_s, whole.ended_s)
            state.feed.drop(whole)
            if state.stepped == whole.stepped:
                state.data_wait_s = whole.data_wait_s
        whole.judged = True

    def report(self, ended: DataPass, number: int, ended_s: float) -> None:
        """Add the event of an epoch, unless epochs last milliseconds."""
        if number > EVENTS_AT_ONCE and ended_s < self._event_s + EVENT_EVERY_S:
            return
        self._event_s = ended_s
        seconds = ended_s - ended.began_s
        text = f"Epoch {number}: {ended.batches} batches, {seconds:.3g} s"
        self._state.recorder.event("epoch", text, seconds=seconds, batches=ended.batches)


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
    state.feed = BatchTracker(batches.report)
    replace(module._BaseDataLoaderIter, "__next__", batches.around_next, traced=False)
