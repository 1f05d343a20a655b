"""Detect growing memory while a run records, or in a recorded run.

    reading ─> lowest of a group ─> the newest groups, at four scales of time ─> trend ─> event

The scales detect a fast leak within a minute and a slow one within hours, and forget what came
before a leak that begins late. A reading costs some microseconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from stepscope.memory.growth import (
    LEAST_READINGS,
    STRETCHES,
    GrowthSource,
    GrowthTrend,
    MemoryGrowth,
    batches_grow,
    find_trend,
    is_material,
    may_rise,
)
from stepscope.metrics import Stream
from stepscope.recorder.recorder import Recorder
from stepscope.store import EventRow, StoreReader

EVENT = "memory_growth"  # Kind of the events that tell of growth.
SCALES_S = {"allocated": (0.5, 4.0, 32.0, 256.0), "process": (1.0, 8.0, 64.0, 512.0)}
"""Time of a group, at least: windows of 16 s to 9 h, and of 32 s to 18 h."""
GROUPS = 4 * LEAST_READINGS
JUDGED_EVERY = 4  # Groups that come between two judgements of a scale.
WARM_UP_STEPS, WARM_UP_S = 20, 5.0
"""Left out at the start: optimizer state, workspaces and thread pools are allocated then."""
FASTER = 1.5  # Told again where the rate is higher by this factor, and the intervals differ.
EVEN = 0.5
"""Evenness from which on a changed rate is believed: a window across the change has a mean rate."""
AGAIN = 2.0  # Told again where there is so many times as much memory as when it was told.


class MemorySample(NamedTuple):
    """One reading: epoch or monotonic seconds, the step, bytes, and what else is known then."""

    at: float
    step: int
    value: float
    children: float = 0.0
    collections: int | None = None
    peak: float = -math.inf  # Bytes of the highest allocation that is known by then.
    highest: float = -math.inf
    """The highest reading of the group, in a reading that stands for one."""


@dataclass(slots=True)
class MinimumWindow:
    """The lowest readings of the newest groups; each takes `span_s` and a new step at least."""

    span_s: float
    highest: float = -math.inf  # The highest of the groups that are not kept any more.
    groups: deque[MemorySample] = field(default_factory=deque)
    closed: int = 0
    _first: MemorySample | None = None
    _lowest: MemorySample | None = None
    _highest: float = -math.inf

    def add(self, reading: MemorySample) -> bool:
        """Add a reading; True if it begins a new group."""
        first, lowest = self._first, self._lowest
        if first is not None and lowest is not None:
            if reading.at - first.at < self.span_s or reading.step <= first.step:
                self._highest = max(self._highest, reading.value)
                if reading.value < lowest.value:
                    self._lowest = reading
                return False
            if len(self.groups) == GROUPS:
                self._drop()
            self.groups.append(lowest._replace(highest=self._highest))
            self.closed += 1
        self._first = self._lowest = reading
        self._highest = reading.value
        return first is not None

    def forget(self) -> None:
        """Begin again, but for the highest."""
        while self.groups:
            self._drop()
        self._first = self._lowest = None

    def trend(self, newest: int) -> tuple[GrowthTrend, list[MemorySample]] | None:
        """Return the trend of the newest groups, with them.

        Memory that has been as high before comes and goes: that is no trend.
        """
        window = list(self.groups)[-newest:]
        values = [reading.value for reading in window]
        if len(window) < LEAST_READINGS or not may_rise(values):
            return None
        older = islice(self.groups, len(self.groups) - len(window))
        highest = max((reading.value for reading in older), default=self.highest)
        if min(values[-len(values) // STRETCHES :]) <= max(highest, self.highest):
            return None
        steps = np.array([reading.step for reading in window], float)
        trend = find_trend(steps, np.array(values))
        return None if trend is None else (trend, window)

    def _drop(self) -> None:
        self.highest = max(self.highest, self.groups.popleft().value)


class GrowthDetector:
    """One kind of memory, "allocated" or "process"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._scales = [MinimumWindow(span_s) for span_s in SCALES_S[kind]]
        self._begun: MemorySample | None = None
        self._told: GrowthTrend | None = None
        self._was_filling = False

    def add(self, reading: MemorySample, *, filling: bool = False) -> MemoryGrowth | None:
        """Return growth that is news with this reading; `filling`: this is the first epoch."""
        begun = self._begun = self._begun or reading
        if self._was_filling and not filling:  # what came in the first epoch is no sign any more
            self._forget()
        self._was_filling = filling
        if reading.step - begun.step < WARM_UP_STEPS or reading.at - begun.at < WARM_UP_S:
            return None
        for scale in self._scales:
            if scale.add(reading) and scale.closed % JUDGED_EVERY == 0:
                growth = self._judge(scale, filling)
                if growth is not None and self._is_news(growth.trend):
                    self._told = growth.trend
                    self._forget()  # what comes next is judged by itself
                    return growth
        return None

    def _forget(self) -> None:
        for scale in self._scales:
            scale.forget()

    def _judge(self, scale: MinimumWindow, filling: bool) -> MemoryGrowth | None:
        for newest in (GROUPS, LEAST_READINGS):
            found = scale.trend(newest)
            if found is None:
                continue
            trend, window = found
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
        children = [reading.children for reading in window]
        grown = float(np.median(children[-part:]) - np.median(children[:part]))
        return MemoryGrowth(
            where=GrowthSource.WORKERS if 2 * grown > trend.grown else GrowthSource.PROCESS,
            trend=trend,
            collections=runs,
            workers=children[-1],
            workers_grown=grown,
        )

    def _is_news(self, now: GrowthTrend) -> bool:
        told = self._told
        if told is None or now.level >= AGAIN * told.level:
            return True
        faster = now.low > told.high and now.bytes_per_step >= FASTER * told.bytes_per_step
        return faster and now.evenness >= EVEN


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
        self._memory = MemorySeries()

    def observe(self, values: Mapping[str, float]) -> None:
        """Add the values of one tick by their metric keys."""
        step, filling = self._recorder.step, self._recorder.epoch == 1
        if step > 0:
            now, collections = self._clock(), self._collections()
            for growth in self._memory.add(now, step, values, collections, filling=filling):
                self._recorder.event(EVENT, f"{growth.text} {growth.next}", **growth.data)


class MemorySeries:
    """The memory of one process: torch's allocated, and its own with its children."""

    def __init__(self) -> None:
        self._allocated, self._process = GrowthDetector("allocated"), GrowthDetector("process")
        self._children = 0.0

    def add(
        self,
        at: float,
        step: int,
        values: Mapping[str, float],
        collections: int | None = None,
        *,
        filling: bool = False,
    ) -> list[MemoryGrowth]:
        """Return the growth that is news with these values; `filling`: this is the first epoch."""
        self._children = values.get("process/children_rss", self._children)
        allocated, rss = values.get("memory/allocated"), values.get("process/rss")
        found = []
        if allocated is not None:
            peak = values.get("memory/peak_allocated", -math.inf)
            reading = MemorySample(at, step, allocated, 0.0, collections, peak)
            found.append(self._allocated.add(reading))
        if rss is not None:
            whole = MemorySample(at, step, rss + self._children, self._children, collections)
            found.append(self._process.add(whole, filling=filling))
        return [growth for growth in found if growth is not None]


def _of_batches(window: list[MemorySample]) -> bool:
    """Say whether the floor rises with the batches, by torch's own peak or the highest readings."""
    steps = np.array([reading.step for reading in window], float)
    floors = np.array([reading.value for reading in window])
    peaks = np.array([[reading.peak, reading.highest] for reading in window])
    return any(
        bool(np.isfinite(known).all()) and batches_grow(steps, floors, known) for known in peaks.T
    )


def _collections(window: list[MemorySample]) -> int | None:
    first, last = window[0].collections, window[-1].collections
    return None if first is None or last is None else last - first


BUCKETS = 1024  # Maximum number of buckets of the samples that are read, whatever the run's length.


def told_growth(events: Iterable[EventRow]) -> tuple[str, str | None] | None:
    """Return the text of the newest event of growth and its advice; None without one."""
    found = [event for event in events if event.kind == EVENT]
    if not found:
        return None
    text, advice = found[-1].text, found[-1].data.get("next")
    if not isinstance(advice, str):  # the file may be foreign
        return text, None
    return text.removesuffix(advice).strip(), advice


def recorded_growth(reader: StoreReader, run_json: Mapping[str, Any]) -> MemoryGrowth | None:
    """Return growth that lasts to the last sample, None if none is certain. Raises StoreError."""
    series = {(info.stream, info.source): info for info in reader.series()}
    info = series.get((Stream.SAMPLES.value, ""))
    if info is None or info.rows == 0:
        return None
    block = reader.read(info.id, 0, info.rows, 1 << max(0, (info.rows - 1) // BUCKETS).bit_length())
    columns = [block.low[block.keys.index(key)].tolist() for key in block.keys]
    memory, newest = MemorySeries(), None
    held: dict[str, float] = {}
    last = 0
    filling = run_json.get("epoch") == 1
    for ts, step, *row in zip(block.ts.tolist(), block.step.tolist(), *columns, strict=True):
        values = dict(zip(block.keys, row, strict=True))
        known = {key: value for key, value in values.items() if math.isfinite(value)}
        found = memory.add(ts, int(step), known, filling=filling) if step > 0 else []
        newest = found[0] if found else newest
        held |= known
        last = max(last, int(step))
    if newest is None:
        return None
    level = held.get("process/rss", 0.0) + held.get("process/children_rss", 0.0)
    if newest.where is GrowthSource.ALLOCATED:
        level = held["memory/allocated"]
    trend = newest.trend
    # A cache that filled up grew, and does not grow now.
    if level - trend.level < EVEN * trend.bytes_per_step * (last - trend.last_step):
        return None
    return replace(newest, trend=replace(trend, level=level))
