"""Detect memory growth from step to step, and record it as an event.

    sample ─> minimum of a group ─> the newest groups, at four time scales ─> trend ─> event

The scales detect a fast leak within a minute and a slow one within hours, and forget the time
before a leak that begins late. A sample costs some microseconds.

A sample is the minimum of a short time. The shape is that of the *floor*: the rolling minimum of
all later samples. With a leak the floor rises in each of eight stretches by similar amounts. It
does not with noise, a step, a sawtooth (of a garbage collector or of epochs) or a cache that fills.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from stepscope.common.formatting import format_bytes
from stepscope.store import EventRow
from stepscope.store.blocks import Floats
from stepscope.store.recorder import Recorder

STRETCHES = 8
MIN_SAMPLES = 4 * STRETCHES
MIN_RATE = 0.2  # Of a stretch, as a fraction of the mean: below, the memory did not grow there.
MAX_RATE = 2.0  # Of a stretch, as a multiple of the mean: above, it was a single step in memory.
MIN_LATE_RATE = 0.6  # Last three rises, as a fraction of the first three: below, a cache fills.
MIN_BYTES = {"allocated": 4 * 2**20, "process": 16 * 2**20}  # Growth within the window.
MIN_FRACTION = {"allocated": 0.01, "process": 0.02}  # Of the level before the window.
EARLY_S = {"allocated": 60.0, "process": 300.0}
MIN_EARLY_FRACTION = {"allocated": 0.10, "process": 0.30}
"""The same in windows shorter than EARLY_S: caches and pools fill, garbage is not collected yet."""
MIN_FILLING_FRACTION = 0.25  # Of a process in its first epoch, when a data set's cache may fill.


class GrowthSource(StrEnum):
    """What grows: torch's allocated memory, this process, or its children."""

    ALLOCATED = "allocated"
    PROCESS = "process"
    WORKERS = "workers"


@dataclass(frozen=True, slots=True)
class GrowthTrend:
    """A steady rise from one step to another; the levels are in bytes."""

    first_step: int
    last_step: int
    first_level: float
    last_level: float

    @property
    def steps(self) -> int:
        """Number of steps in which the memory grew."""
        return max(1, self.last_step - self.first_step)

    @property
    def grown(self) -> float:
        """The growth in bytes."""
        return self.last_level - self.first_level

    @property
    def bytes_per_step(self) -> float:
        """The mean growth of a step."""
        return self.grown / self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Growing memory and its source; `workers` is their memory at the window's end, in bytes."""

    where: GrowthSource
    trend: GrowthTrend
    workers: float = 0.0

    @property
    def text(self) -> str:
        """The rate and the level, as a sentence."""
        name = "The process's memory"
        workers = ""
        if self.where is GrowthSource.ALLOCATED:
            name = "Allocated memory"
        elif self.workers:
            name = "The memory of this process with its workers"
            workers = f"; the workers have {format_bytes(self.workers)}"
        rate = format_bytes(100 * self.trend.bytes_per_step)
        level = format_bytes(self.trend.last_level)
        return (
            f"{name} grows by {rate} per 100 steps ({self.trend.steps:,} steps) "
            f"and is now {level}{workers}."
        )

    @property
    def next(self) -> str:
        """The recommendation, as sentences."""
        return _ADVICE[self.where]


_ADVICE = {
    GrowthSource.ALLOCATED: (
        "Look for tensors kept across steps: a list or sum of losses with their graphs (use "
        "loss.item() or loss.detach()), outputs stored by hooks, retain_graph=True. If batches "
        "get longer, as in an epoch sorted by length, the last batch simply needs more and "
        "nothing leaks. A memory snapshot shows what allocated them."
    ),
    GrowthSource.PROCESS: (
        "Look for objects kept across steps: a list or sum of losses with their graphs (use "
        "loss.item() or loss.detach()), collected results, a dataset that keeps every sample "
        "it has read, reference cycles (Collect garbage frees them)."
    ),
    GrowthSource.WORKERS: (
        "Each worker copies the dataset pages it touches: reading a long list or dict of "
        "Python objects changes their reference counts. Store them in one array or tensor, use "
        "fewer workers, or check what the dataset keeps per sample."
    ),
}


def is_material(trend: GrowthTrend, kind: str, seconds: float, *, filling: bool = False) -> bool:
    """Return True if the growth in a window of `seconds` is large enough to report.

    `kind` is "allocated" or "process". `filling`: this is the first epoch.
    """
    fraction = MIN_EARLY_FRACTION[kind] if seconds < EARLY_S[kind] else MIN_FRACTION[kind]
    if filling:
        fraction = max(fraction, MIN_FILLING_FRACTION)
    return trend.grown >= max(MIN_BYTES[kind], fraction * trend.first_level)


def find_trend(steps: Floats, values: Floats, min_samples: int = MIN_SAMPLES) -> GrowthTrend | None:
    """Return the rise of `values` (bytes) over steps that do not fall; None if it is not steady."""
    if len(steps) < min_samples:
        return None
    floor = np.minimum.accumulate(values[::-1])[::-1]
    if floor[0] == floor[len(floor) // 4]:  # most series end here, in a few microseconds
        return None
    stretches = np.array_split(np.arange(len(steps)), STRETCHES)
    levels = np.array([np.median(floor[stretch]) for stretch in stretches])
    middles = np.array([np.median(steps[stretch]) for stretch in stretches])
    widths = np.diff(middles)
    if widths.min() <= 0:
        return None
    rates = np.diff(levels) / widths
    mean = (levels[-1] - levels[0]) / (middles[-1] - middles[0])
    third = len(rates) // 2
    is_steady = (
        rates.min() > MIN_RATE * mean
        and rates.max() <= MAX_RATE * mean
        and rates[-third:].mean() >= MIN_LATE_RATE * rates[:third].mean()
    )
    if not is_steady:
        return None
    return GrowthTrend(int(middles[0]), int(middles[-1]), float(levels[0]), float(levels[-1]))


EVENT = "memory_growth"  # Kind of the events about growth.
SCALES_S = {"allocated": (0.5, 4.0, 32.0, 256.0), "process": (1.0, 8.0, 64.0, 512.0)}
"""Minimum duration of a group: windows of 16 s to 9 h, and of 32 s to 18 h."""
MAX_GROUPS = 4 * MIN_SAMPLES
GROUPS_PER_EVALUATION = 4
WARM_UP_STEPS, WARM_UP_S = 20, 5.0  # Excluded: optimizer state, workspaces, pools are allocated.
NEWEST_S = 0.1  # Duration of a group of the newest samples, of some 13 s.
MIN_NEWEST_SAMPLES = 2 * STRETCHES
"""Minimum number of groups for growth without an event: an allocation that failed is evidence."""
MIN_LEVEL_FACTOR = 2.0  # Minimum factor of the memory since the last event for another event.


class MemorySample(NamedTuple):
    """One sample: seconds, step, bytes, and the bytes of child processes in them."""

    at: float
    step: int
    value: float
    children: float = 0.0


class MinimumWindow:
    """The lowest samples of the newest groups; each takes at least `span_s` and a new step."""

    def __init__(self, span_s: float) -> None:
        self.groups: deque[MemorySample] = deque()
        self._span_s = span_s
        self._highest = -math.inf  # The highest value of dropped groups.
        self._closed = 0
        self._first: MemorySample | None = None
        self._lowest: MemorySample | None = None

    def add(self, sample: MemorySample) -> bool:
        """Add a sample; return True if the groups should be evaluated."""
        first, lowest = self._first, self._lowest
        if first is None or lowest is None:
            self._first = self._lowest = sample
            return False
        if sample.at - first.at < self._span_s or sample.step <= first.step:
            if sample.value < lowest.value:
                self._lowest = sample
            return False
        if len(self.groups) == MAX_GROUPS:
            self._highest = max(self._highest, self.groups.popleft().value)
        self.groups.append(lowest)
        self._first = self._lowest = sample
        self._closed += 1
        return self._closed % GROUPS_PER_EVALUATION == 0

    def reset(self) -> None:
        """Drop all groups, but keep the highest value."""
        self._highest = max([self._highest, *(group.value for group in self.groups)])
        self.groups.clear()
        self._first = self._lowest = None

    def trend(self) -> GrowthTrend | None:
        """Return the trend of the groups; None without one, or if memory was as high before."""
        steps, values = self.columns()
        if len(steps) < MIN_SAMPLES or values[-len(steps) // STRETCHES :].min() <= self._highest:
            return None
        return find_trend(steps, values)

    def columns(self) -> tuple[Floats, Floats]:
        """Return the steps and the bytes of the groups. Thread-safe."""
        groups = list(self.groups)
        steps = np.array([group.step for group in groups], float)
        return steps, np.array([group.value for group in groups], float)


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
        if self._was_filling and not filling:  # a cache that filled in the first epoch
            self._reset()
        self._was_filling = filling
        if sample.step - first.step < WARM_UP_STEPS or sample.at - first.at < WARM_UP_S:
            return None
        for scale in self._scales:
            if scale.add(sample):
                trend = self._new_trend(scale, filling)
                if trend is not None:
                    growth = self._growth(trend, list(scale.groups))
                    self.reported = trend
                    self._reset()  # later samples are evaluated without these
                    return growth
        return None

    def _reset(self) -> None:
        for scale in self._scales:
            scale.reset()

    def _new_trend(self, scale: MinimumWindow, filling: bool) -> GrowthTrend | None:
        """Return a trend to report: the first one, or another after the memory has doubled."""
        trend, last = scale.trend(), self.reported
        if trend is None or (
            last is not None and trend.last_level < MIN_LEVEL_FACTOR * last.last_level
        ):
            return None
        seconds = scale.groups[-1].at - scale.groups[0].at
        return trend if is_material(trend, self._kind, seconds, filling=filling) else None

    def _growth(self, trend: GrowthTrend, window: list[MemorySample]) -> MemoryGrowth:
        if self._kind == GrowthSource.ALLOCATED:
            return MemoryGrowth(where=GrowthSource.ALLOCATED, trend=trend)
        workers = window[-1].children
        grown = workers - window[0].children
        where = GrowthSource.WORKERS if 2 * grown > trend.grown else GrowthSource.PROCESS
        return MemoryGrowth(where=where, trend=trend, workers=workers)


class GrowthMonitor:
    """Checks the sampler's values, in its thread, and records growth as an event.

    Allocated memory is that of the GPU that trains. The process counts with its children.
    """

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._allocated = GrowthDetector("allocated")
        self._process = GrowthDetector("process")
        self._children = 0.0
        self._newest = MinimumWindow(NEWEST_S)

    def observe(self, values: Mapping[str, float]) -> None:
        """Add the values of one tick by their metric keys."""
        step = self._recorder.step
        if step <= 0:
            return
        at = self._clock()
        allocated, rss = values.get("memory/allocated"), values.get("process/rss")
        if allocated is not None:
            sample = MemorySample(at, step, allocated)
            self._newest.add(sample)
            self._record(self._allocated.add(sample))
        if rss is not None:
            self._children = values.get("process/children_rss", self._children)
            sample = MemorySample(at, step, rss + self._children, self._children)
            self._record(self._process.add(sample, filling=self._recorder.epoch == 1))

    def _record(self, growth: MemoryGrowth | None) -> None:
        if growth is not None:
            self._recorder.event(
                EVENT,
                f"{growth.text} {growth.next}",
                where=growth.where.value,
                bytes_per_step=growth.trend.bytes_per_step,
                level=growth.trend.last_level,
                next=growth.next,
            )

    def allocated_growth(self) -> GrowthTrend | None:
        """Return the growth of allocated memory up to now; None without growth. Thread-safe."""
        steps, values = self._newest.columns()
        reported = self._allocated.reported
        if reported is not None:
            level = float(values[-len(values) // STRETCHES :].min())
            if level >= reported.last_level:  # else it was freed since
                return replace(reported, last_step=int(steps[-1]), last_level=level)
        return find_trend(steps, values, MIN_NEWEST_SAMPLES)


def newest_growth(events: Iterable[EventRow]) -> tuple[str, str | None] | None:
    """Return the text of the newest growth event and its recommendation; None without one."""
    newest = next((event for event in reversed(list(events)) if event.kind == EVENT), None)
    if newest is None:
        return None
    advice = newest.data.get("next")
    if not isinstance(advice, str):  # the file is untrusted
        return newest.text, None
    return newest.text.removesuffix(advice).strip(), advice
