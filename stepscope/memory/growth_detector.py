"""Detect growing memory while a run records.

    sample ─> minimum of a group ─> the newest groups, at four time scales ─> trend ─> event

The scales detect a fast leak within a minute and a slow one within hours, and forget the time
before a leak that begins late. A sample costs some microseconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from stepscope.memory.growth import (
    MIN_SAMPLES,
    STRETCHES,
    AllocatedGrowth,
    GrowthSource,
    GrowthTrend,
    MemoryGrowth,
    batches_grow,
    find_trend,
    is_material,
    pair_slopes,
)
from stepscope.store import EventRow
from stepscope.store.recorder import Recorder

EVENT = "memory_growth"  # Kind of the events about growth.
SCALES_S = {"allocated": (0.5, 4.0, 32.0, 256.0), "process": (1.0, 8.0, 64.0, 512.0)}
"""Minimum duration of a group: windows of 16 s to 9 h, and of 32 s to 18 h."""
GROUPS = 4 * MIN_SAMPLES
EVALUATED_EVERY = 4  # Number of new groups between two evaluations of a scale.
WARM_UP_STEPS, WARM_UP_S = 20, 5.0  # Excluded: optimizer state, workspaces, pools are allocated.
FASTER = 1.5  # Minimum factor of the rate for another event; the intervals have to differ as well.
MIN_EVENNESS = 0.5  # Of a changed rate: a window across the change has a mean rate.
NEWEST_S = 0.25  # Duration of a group of the newest samples, of some 30 s.
MIN_GROWING = 8  # Minimum number of groups that show growth without an event.
MIN_RISING_FRACTION = 0.9  # Minimum fraction of pairs of groups of which the later has more.
MIN_CONFIRMED_FRACTION = 0.5  # Slope now by the reported rate: below, the growth has ended.
MIN_LEVEL_FACTOR = 2.0  # Minimum factor of the memory since the last event for another event.


class MemorySample(NamedTuple):
    """One sample: seconds, step, bytes, and further values at that time."""

    at: float
    step: int
    value: float
    children: float = 0.0
    collections: int | None = None
    peak: float = -math.inf  # Highest allocation so far in bytes, if known.
    highest: float = -math.inf  # In a sample that represents a group: its highest value.


@dataclass(slots=True)
class MinimumWindow:
    """The lowest samples of the newest groups; each takes at least `span_s` and a new step."""

    span_s: float
    highest: float = -math.inf  # The highest value of dropped groups.
    groups: deque[MemorySample] = field(default_factory=deque)
    closed: int = 0
    _first: MemorySample | None = None
    _lowest: MemorySample | None = None
    _highest: float = -math.inf

    def add(self, sample: MemorySample) -> bool:
        """Add a sample; return True if it begins a new group."""
        first, lowest = self._first, self._lowest
        if first is not None and lowest is not None:
            if sample.at - first.at < self.span_s or sample.step <= first.step:
                self._highest = max(self._highest, sample.value)
                if sample.value < lowest.value:
                    self._lowest = sample
                return False
            if len(self.groups) == GROUPS:
                self._drop()
            self.groups.append(lowest._replace(highest=self._highest))
            self.closed += 1
        self._first = self._lowest = sample
        self._highest = sample.value
        return first is not None

    def reset(self) -> None:
        """Drop all groups, but keep the highest value."""
        while self.groups:
            self._drop()
        self._first = self._lowest = None

    def trend(self, newest: int) -> tuple[GrowthTrend, list[MemorySample]] | None:
        """Return the trend of the newest groups, with them; None if memory was as high before."""
        window = list(self.groups)[-newest:]
        if len(window) < MIN_SAMPLES:
            return None
        values = np.array([sample.value for sample in window])
        older = islice(self.groups, len(self.groups) - len(window))
        highest = max((sample.value for sample in older), default=self.highest)
        if values[-len(values) // STRETCHES :].min() <= max(highest, self.highest):
            return None
        trend = find_trend(np.array([sample.step for sample in window], float), values)
        return None if trend is None else (trend, window)

    def _drop(self) -> None:
        self.highest = max(self.highest, self.groups.popleft().value)


class GrowthDetector:
    """Detects growth of one kind of memory, "allocated" or "process"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._scales = [MinimumWindow(span_s) for span_s in SCALES_S[kind]]
        self._first: MemorySample | None = None
        self.reported: GrowthTrend | None = None  # The trend of the last growth.
        self._was_filling = False

    def add(self, sample: MemorySample, *, filling: bool = False) -> MemoryGrowth | None:
        """Return growth that is new with this sample; `filling`: this is the first epoch."""
        first = self._first = self._first or sample
        if self._was_filling and not filling:  # growth in the first epoch is no sign any more
            self._reset()
        self._was_filling = filling
        if sample.step - first.step < WARM_UP_STEPS or sample.at - first.at < WARM_UP_S:
            return None
        for scale in self._scales:
            if scale.add(sample) and scale.closed % EVALUATED_EVERY == 0:
                growth = self._growth(scale, filling)
                if growth is not None and self._is_new(growth.trend):
                    self.reported = growth.trend
                    self._reset()  # later samples are evaluated without these
                    return growth
        return None

    def _reset(self) -> None:
        for scale in self._scales:
            scale.reset()

    def _growth(self, scale: MinimumWindow, filling: bool) -> MemoryGrowth | None:
        for trend, window in filter(None, map(scale.trend, (GROUPS, MIN_SAMPLES))):
            if self._kind == GrowthSource.ALLOCATED and _of_batches(window):
                continue
            seconds, runs = window[-1].at - window[0].at, _collections(window)
            if is_material(trend, self._kind, seconds, filling=filling, collected=runs != 0):
                break
        else:
            return None
        if self._kind == GrowthSource.ALLOCATED:
            return MemoryGrowth(where=GrowthSource.ALLOCATED, trend=trend, collections=runs)
        part = len(window) // STRETCHES
        children = [sample.children for sample in window]
        grown = float(np.median(children[-part:]) - np.median(children[:part]))
        return MemoryGrowth(
            where=GrowthSource.WORKERS if 2 * grown > trend.grown else GrowthSource.PROCESS,
            trend=trend,
            collections=runs,
            workers=children[-1],
            workers_grown=grown,
        )

    def _is_new(self, trend: GrowthTrend) -> bool:
        last = self.reported
        if last is None or trend.level >= MIN_LEVEL_FACTOR * last.level:
            return True
        faster = trend.low > last.high and trend.bytes_per_step >= FASTER * last.bytes_per_step
        return faster and trend.evenness >= MIN_EVENNESS


class GrowthMonitor:
    """Checks the sampler's values, in its thread, and records growth as an event.

    Allocated memory is that of the GPU that trains. The process counts with its children.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = time.monotonic,
        collections: Callable[[], int] = lambda: int(gc.get_stats()[-1]["collections"]),
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._collections = collections
        self._allocated, self._process = GrowthDetector("allocated"), GrowthDetector("process")
        self._children = 0.0
        self._newest = MinimumWindow(NEWEST_S)

    def observe(self, values: Mapping[str, float]) -> None:
        """Add the values of one tick by their metric keys."""
        step = self._recorder.step
        if step <= 0:
            return
        at, runs, growth = self._clock(), self._collections(), []
        self._children = values.get("process/children_rss", self._children)
        allocated, rss = values.get("memory/allocated"), values.get("process/rss")
        if allocated is not None:
            peak = values.get("memory/peak_allocated", -math.inf)
            sample = MemorySample(at, step, allocated, 0.0, runs, peak)
            self._newest.add(sample)
            growth.append(self._allocated.add(sample))
        if rss is not None:
            sample = MemorySample(at, step, rss + self._children, self._children, runs)
            growth.append(self._process.add(sample, filling=self._recorder.epoch == 1))
        for one in filter(None, growth):
            self._recorder.event(EVENT, f"{one.text} {one.next}", **one.data)

    def allocated_growth(self) -> AllocatedGrowth | None:
        """Return the growth of allocated memory up to now; None without growth. Thread-safe."""
        groups = list(self._newest.groups)
        steps = np.array([group.step for group in groups], float)
        values = np.array([group.value for group in groups], float)
        slopes = pair_slopes(steps, values)
        rate = float(np.median(slopes)) if len(slopes) else 0.0
        trend = self._allocated.reported
        if trend is not None and not len(slopes):
            return AllocatedGrowth(trend.bytes_per_step, trend.steps, int(trend.grown))
        # The event may be old: it counts unless the newest samples contradict it.
        if trend is not None and rate >= MIN_CONFIRMED_FRACTION * trend.bytes_per_step:
            grown = int(values[-1] - trend.level + trend.grown)
            return AllocatedGrowth(trend.bytes_per_step, int(steps[-1]) - trend.first_step, grown)
        if len(steps) < MIN_GROWING or (slopes > 0).mean() < MIN_RISING_FRACTION:
            return None
        span = int(steps[-1] - steps[0])
        return AllocatedGrowth(rate, span, int(rate * span))


def _of_batches(window: list[MemorySample]) -> bool:
    """Return True if the floor rises with the batches, by torch's peak or the highest samples."""
    columns = np.array([[one.step, one.value, one.peak, one.highest] for one in window], float).T
    steps, floors, *peaks = columns
    return any(np.isfinite(peak).all() and batches_grow(steps, floors, peak) for peak in peaks)


def _collections(window: list[MemorySample]) -> int | None:
    first, last = window[0].collections, window[-1].collections
    return None if first is None or last is None else last - first


def newest_growth(events: Iterable[EventRow]) -> tuple[str, str | None] | None:
    """Return the text of the newest growth event and its recommendation; None without one."""
    newest = next((event for event in reversed(list(events)) if event.kind == EVENT), None)
    if newest is None:
        return None
    advice = newest.data.get("next")
    if not isinstance(advice, str):  # the file is untrusted
        return newest.text, None
    return newest.text.removesuffix(advice).strip(), advice
