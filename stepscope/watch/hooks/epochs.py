"""Track the batches and the epoch of each step.

A fetched batch is queued until a step uses it. A loop that reads ahead (accelerate, Hugging Face)
fetches more before the first step of a pass than before its second; the difference is read ahead.

An epoch is a pass over the training loader. The next epoch begins after the end of that loader, or
after a restart that follows several steps (`break`). In other cases, such as several loaders side
by side or in turn, the epoch is None for the rest of the run. It is None in the first pass of a
loader without a length, which may be endless.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from stepscope.session.training_facts import LoaderFacts

MAX_WAITING = 4096  # Maximum number of unused batches; a script with more does not train.
MAX_DENSE_EVENTS = 50  # Number of epochs that all have an event.
MIN_EVENT_INTERVAL_S = 1.0  # Minimum interval between the events of later epochs.


@dataclass(slots=True, kw_only=True, eq=False)
class DataPass:
    """One pass over a loader, with the counters at its start."""

    order: int
    dataset: int
    loader: LoaderFacts
    began_s: float
    length: float = math.inf  # Number of batches; infinite if unknown.
    is_finite: bool = True
    until: float = math.inf  # The iterator's number of the last batch.
    batch_size: int = 0  # 0 if unknown.
    rows: int = 0  # The iterator's number of the last sample.
    ended_s: float = 0.0
    batches: int = 0
    ended: bool = False  # True after StopIteration or a restart of the loader.
    is_classified: bool = False  # True once known as training or evaluation.
    steps: int = 0
    first_step: tuple[int, int] = (0, 0)  # Batches and `backward()` calls up to the first step.
    is_learning: bool = True  # True until two steps have shown the number of batches read ahead.
    backwards: int = 0
    stepped: int = 0
    data_wait_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """True if all batches were read."""
        return self.ended or self.batches >= self.length


class BatchTracker:
    """Queue of the batches between the loaders and the steps."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.epoch: int | None = None  # Epoch of the last step, counted from 1; None if uncertain.
        self.is_read = False  # True once a step has used a batch of a loader.
        self._waiting: deque[tuple[DataPass, int]] = deque(maxlen=MAX_WAITING)
        self._used: list[tuple[DataPass, int]] = []
        self._ahead = 0
        self._current: DataPass | None = None
        self._number = 0
        self._is_certain = True
        self._stepped_s = 0.0
        self._event_s = 0.0

    def put(self, source: DataPass, samples: int) -> None:
        """Add a fetched batch; drop one with which the last pass was left by `break`."""
        last = self._current
        if last is not None and source is not last and source.dataset == last.dataset:
            is_left = last.steps > 1 and last.is_finite and not last.is_whole
            if is_left and not self._ahead:
                self.drop(last)
        self._waiting.append((source, samples))

    def drop(self, source: DataPass) -> None:
        """Remove the batches of a pass that was evaluation."""
        kept = [batch for batch in self._waiting if batch[0] is not source]
        self._waiting.clear()
        self._waiting.extend(kept)

    def drop_left_over(self) -> None:
        """Remove the batches of earlier passes, whose gradients the script has cleared."""
        if not self._waiting:
            return
        newest = self._waiting[-1][0]
        for source in {source for source, _ in self._waiting}:
            if source is not newest and source.ended and source.dataset == newest.dataset:
                self.drop(source)

    def take(self, backwards: int, now_s: float) -> int:
        """Return the number of samples of a step with `backwards` calls of `backward()`."""
        waiting = self._waiting
        newest = waiting[-1][0] if waiting else self._current
        if newest is None:
            return 0
        is_same = newest is self._current and not (newest.is_learning or self._ahead)
        if is_same and len(waiting) == 1:  # the common case
            newest.steps += 1
            self._stepped_s = now_s
            return waiting.popleft()[1]
        if newest.is_learning:
            self._learn(newest, backwards)
        self._used = []
        if waiting:
            count = len(waiting) - self._ahead
            if newest.ended or (count < 1 and newest.is_whole):
                count = max(1, backwards)
            self._used = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        elif newest.ended:  # batches that are used again, such as by itertools.cycle
            self.epoch = None
        if self._used:
            self._use()
        self._stepped_s = now_s
        return sum(samples for _, samples in self._used)

    def close(self, whole: DataPass) -> None:
        """Report the end of an epoch."""
        if whole is self._current and self._is_certain:
            self._report(whole, self._number, whole.ended_s)

    def _learn(self, newest: DataPass, backwards: int) -> None:
        """Find how many batches are read ahead, from the first two steps of a pass."""
        if not newest.steps:
            newest.first_step = newest.batches, backwards
            return
        newest.is_learning = False
        first, same = newest.first_step
        each = newest.batches - first
        if newest.is_whole:  # the pass may have ended during the reading ahead
            each = max(each, same)
        elif backwards != same or not each:
            return
        ahead = max(0, first - each)
        if ahead > self._ahead:  # batches attributed to the first step are used by this step
            self._waiting.extendleft(reversed(self._used[self._ahead - ahead :]))
        self._ahead = ahead

    def _use(self) -> None:
        source = self._used[-1][0]
        if source is not self._current:
            self._turn_to(source)
        if any(batch[0].dataset != source.dataset for batch in self._used):  # side by side
            self._is_certain = False
        source.steps += 1
        is_known = self._is_certain and (self._number > 1 or source.is_finite)
        self.epoch = self._number if is_known else None
        self.is_read = True

    def _turn_to(self, source: DataPass) -> None:
        """Detect the next epoch when the steps use another pass."""
        before = self._current
        self._current = source
        if before is None:
            self._number = 1
        elif source.order < before.order:  # such as zip(long, cycle(short)), or in turn
            self._is_certain = self._is_certain and not source.steps
        elif before.is_whole or (source.dataset == before.dataset and before.steps > 1):
            if self._is_certain and not before.is_classified:
                self._report(before, self._number, self._stepped_s)
            self._number += 1
        else:
            self._is_certain = False

    def _report(self, ended: DataPass, number: int, ended_s: float) -> None:
        """Add the event of an epoch, unless epochs last milliseconds."""
        if number > MAX_DENSE_EVENTS and ended_s < self._event_s + MIN_EVENT_INTERVAL_S:
            return
        self._event_s = ended_s
        seconds = ended_s - ended.began_s
        text = f"Epoch {number}: {ended.batches} batches, {seconds:.3g} s"
        self._recorder.event("epoch", text, seconds=seconds, batches=ended.batches)
