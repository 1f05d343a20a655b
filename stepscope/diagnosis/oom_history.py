"""What the steps before a failed allocation needed: a trend, or their usual peak. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from stepscope.diagnosis.oom_record import OomRecord

ALLOCATED, PEAK = "memory/allocated", "memory/peak_allocated"
FIRST_STEPS = 2
"""Steps whose memory is no rule yet: the optimizer's state and the libraries' workspaces come."""
TREND_STEPS = 6
"""Different steps below which no trend is told."""
COMPARED = 60
"""Groups of steps that a trend compares with each other, at most."""
LARGEST = 1e15
"""Bytes or steps that nobody has."""
RISES = 0.9
"""Share of the pairs of steps in which the later one has more: ups and downs are no trend."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Allocated memory that grows: bytes a step, and over how many steps so far."""

    per_step: float
    steps: int

    @property
    def grown(self) -> int:
        """Bytes in all."""
        return int(self.per_step * self.steps)


def trend(record: OomRecord, growth: Mapping[str, Any] | None = None) -> Trend | None:
    """Return the growth of allocated memory, by the run's own event of it or by the last samples.

    `growth` is what that event says: `bytes_per_step` and `steps`, checked here.
    """
    if growth is not None and growth.get("where", "allocated") == "allocated":
        per_step, steps = _number(growth.get("bytes_per_step")), _number(growth.get("steps"))
        if 0 < per_step < LARGEST and 0 < steps < LARGEST:
            return Trend(per_step, max(int(steps), record.steps_done or 0))
    points = at_boundaries(record)
    if len(points) < TREND_STEPS:
        return None
    every = max(1, -(-len(points) // COMPARED))
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    # The lowest of each: every third point of what goes up every third step would mislead.
    lowest = [min(group, key=lambda point: point[1]) for group in groups]
    pairs = list(combinations(lowest, 2))
    rising = sum(later[1] > earlier[1] for earlier, later in pairs)
    if rising < RISES * len(pairs):
        return None
    slope = median((later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs)
    seen = points[-1][0] - points[0][0]
    return Trend(slope, max(seen, record.steps_done or 0)) if slope > 0 else None


def at_boundaries(record: OomRecord) -> list[tuple[int, float]]:
    """Return (step, allocated bytes) of the last steps, as it was when each had ended.

    A reading inside a long step has that step's tensors too: the lowest of a step counts.
    """
    lowest: dict[int, float] = {}
    for step, value in _column(record, ALLOCATED):
        if step > FIRST_STEPS + _first_step(record):
            lowest[step] = min(value, lowest.get(step, value))
    return sorted(lowest.items())


def usual_peak(record: OomRecord) -> int | None:
    """Return the most that was allocated in steps that ended; None where no reading tells.

    The peak that is read after step n may hold what the step under way has taken so far, so only
    readings from before the last boundary count.
    """
    done = record.steps_done
    if done is None or done < FIRST_STEPS:
        return None
    peaks = [value for step, value in _column(record, PEAK) if step < record.step]
    return int(max(peaks)) if peaks else None


def _first_step(record: OomRecord) -> int:
    """Return the step after which this run began: not 0 for a resumed one."""
    return record.step - (record.steps_done or 0)


def _column(record: OomRecord, key: str) -> list[tuple[int, float]]:
    values = record.readings.columns.get(key, ())
    pairs = zip(record.readings.steps, values, strict=False)
    return [(step, value) for step, value in pairs if value is not None]


def _number(value: Any) -> float:
    """Return a number of an event's data, 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if -LARGEST < value < LARGEST else 0.0
