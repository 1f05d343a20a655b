"""Watches a run's memory for growth, from the values that the sampler has anyway.

    reading ─> lowest of a group ─> the newest groups, at four scales of time ─> trend ─> news

The scales let it see a fast leak within a minute and a slow one within hours, and forget what came
before a leak that begins late. It costs some microseconds a reading.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from stepscope.diagnosis.growth import (
    LEAST_READINGS,
    STRETCHES,
    Growth,
    Trend,
    Where,
    find_trend,
    is_material,
)

EVENT = "memory_growth"
"""Kind of the events that tell of growth."""
SCALES_S = (0.5, 4.0, 32.0, 256.0)
"""Time of a group, at least: windows of up to 1 min, 8 min, 1 h and 9 h."""
GROUPS = 4 * LEAST_READINGS
JUDGED_EVERY = 4
"""Groups that come between two judgements of a scale."""
WARM_UP_STEPS, WARM_UP_S = 20, 5.0
"""Left out at the start: optimizer state, workspaces and thread pools are allocated then."""
FASTER = 1.5
"""Told again where the rate has changed by this factor, either way, and the intervals differ."""
EVEN = 0.5
"""Evenness from which on a changed rate is believed: a window across the change has a mean rate."""
AGAIN = 2.0
"""Told again where there is so many times as much memory as when it was told."""


class Reading(NamedTuple):
    """One reading: epoch or monotonic seconds, the step, bytes, and what else is known then."""

    at: float
    step: int
    value: float
    children: float = 0.0
    collections: int | None = None


@dataclass(slots=True)
class Floors:
    """The lowest readings of the newest groups; each takes `span_s` and a new step at least."""

    span_s: float
    groups: deque[Reading] = field(default_factory=lambda: deque(maxlen=GROUPS))
    closed: int = 0
    _first: Reading | None = None
    _lowest: Reading | None = None

    def add(self, reading: Reading) -> bool:
        """Add a reading; True if it begins a new group."""
        first, lowest = self._first, self._lowest
        if first is None or lowest is None:
            self._first = self._lowest = reading
            return False
        if reading.at - first.at >= self.span_s and reading.step > first.step:
            self.groups.append(lowest)
            self.closed += 1
            self._first = self._lowest = reading
            return True
        if reading.value < lowest.value:
            self._lowest = reading
        return False

    def trend(self, newest: int) -> tuple[Trend, list[Reading]] | None:
        """Return the trend of the newest groups, with them."""
        if len(self.groups) < LEAST_READINGS:
            return None
        window = list(self.groups)[-newest:]
        steps = np.array([reading.step for reading in window], float)
        trend = find_trend(steps, np.array([reading.value for reading in window]))
        return None if trend is None else (trend, window)


class Series:
    """One kind of memory, "allocated" or "process"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._forget()
        self._begun: Reading | None = None
        self._told: Growth | None = None
        self._was_filling = False

    def add(self, reading: Reading, *, filling: bool = False) -> Growth | None:
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
                if growth is not None and self._is_news(growth):
                    self._told = growth
                    self._forget()  # what comes next is judged by itself
                    return growth
        return None

    def _forget(self) -> None:
        self._scales = [Floors(span_s) for span_s in SCALES_S]

    def _judge(self, scale: Floors, filling: bool) -> Growth | None:
        for newest in (GROUPS, LEAST_READINGS):
            found = scale.trend(newest)
            if found is not None and is_material(found[0], self._kind, filling=filling):
                return Growth(
                    where=self._where(*found),
                    trend=found[0],
                    collections=_collections(found[1]),
                )
        return None

    def _where(self, trend: Trend, window: list[Reading]) -> Where:
        if self._kind == Where.ALLOCATED:
            return Where.ALLOCATED
        part = len(window) // STRETCHES
        children = [reading.children for reading in window]
        grown = float(np.median(children[-part:]) - np.median(children[:part]))
        return Where.WORKERS if 2 * grown > trend.grown else Where.PROCESS

    def _is_news(self, growth: Growth) -> bool:
        if self._told is None:
            return True
        now, told = growth.trend, self._told.trend
        if now.level >= AGAIN * told.level:
            return True
        apart = now.low > told.high or now.high < told.low
        factor = now.bytes_per_step / told.bytes_per_step
        return apart and now.evenness >= EVEN and not 1 / FASTER < factor < FASTER


class Notes(Protocol):
    """What is needed of a Recorder."""

    step: int
    epoch: int

    def event(self, kind: str, text: str, /, **data: Any) -> None: ...


class GrowthWatch:
    """Looks at what the sampler has recorded, in its thread, and marks growth as an event.

    Allocated memory is that of the GPU that trains. The process counts with its children.
    """

    def __init__(
        self,
        recorder: Notes,
        *,
        clock: Callable[[], float] = time.monotonic,
        collections: Callable[[], int] = lambda: int(gc.get_stats()[-1]["collections"]),
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._collections = collections
        self._allocated, self._process = Series("allocated"), Series("process")
        self._children = 0.0

    def observe(self, values: Mapping[str, float]) -> None:
        """Take the values of one tick by their metric keys."""
        step = self._recorder.step
        if step <= 0:
            return
        self._children = values.get("process/children_rss", self._children)
        now, collections = self._clock(), self._collections()
        allocated, rss = values.get("memory/allocated"), values.get("process/rss")
        if allocated is not None:
            self._tell(self._allocated.add(Reading(now, step, allocated, 0.0, collections)))
        if rss is not None:
            whole = Reading(now, step, rss + self._children, self._children, collections)
            self._tell(self._process.add(whole, filling=self._recorder.epoch == 1))

    def _tell(self, growth: Growth | None) -> None:
        if growth is not None:
            self._recorder.event(EVENT, f"{growth.text} {growth.next}", **growth.data)


def _collections(window: list[Reading]) -> int | None:
    first, last = window[0].collections, window[-1].collections
    return None if first is None or last is None else last - first
