"""What the steps before a failed allocation needed: a trend, or their usual peak. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from stepscope.memory.oom.record import OomRecord

ALLOCATED, PEAK = "memory/allocated", "memory/peak_allocated"
FIRST_STEPS = 2
"""Steps whose memory is no rule yet: the optimizer's state and the libraries' workspaces come."""
TREND_STEPS = 6
"""Different steps below which no trend is told."""
COMPARED = 60
"""Groups of steps that a trend compares with each other, at most."""
LARGEST = 1e15
"""Bytes or steps that nobody has."""
CONFIRMED = 0.5
"""Share of an event's rate at which the last steps still grow, at least: else it is over."""
RISES = 0.9
"""Share of the pairs of steps in which the later one has more: ups and downs are no trend."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Allocated memory that grows: bytes a step, over how many steps that was seen, and by what.

    Nothing is said of steps that nobody has looked at.
    """

    per_step: float
    steps: int
    grown: int


def trend(record: OomRecord, growth: Mapping[str, Any] | None = None) -> Trend | None:
    """Return the growth of allocated memory, by the run's own event of it or by the last samples.

    `growth` is what that event says: `bytes_per_step` and `steps`, checked here. It may be old: it
    counts unless the last samples say otherwise.
    """
    points = at_boundaries(record)
    seen = _seen(points)
    told = _told(growth)
    if told is None or (seen is not None and seen.grown >= told.grown):
        return seen
    goes_on = len(points) < 2 or _slope(_lowest(points)) >= CONFIRMED * told.per_step
    return told if goes_on else seen


def _told(growth: Mapping[str, Any] | None) -> Trend | None:
    """Return what an event says of the steps that it is about."""
    if growth is None or growth.get("where", "allocated") != "allocated":
        return None
    per_step, steps = _number(growth.get("bytes_per_step")), _number(growth.get("steps"))
    if not (0 < per_step < LARGEST and 0 < steps < LARGEST):
        return None
    return Trend(per_step, int(steps), int(per_step * int(steps)))


def _seen(points: list[tuple[int, float]]) -> Trend | None:
    """Return the growth within the last samples, no more than from the first to the last one."""
    if len(points) < TREND_STEPS:
        return None
    lowest = _lowest(points)
    pairs = list(combinations(lowest, 2))
    rising = sum(later[1] > earlier[1] for earlier, later in pairs)
    slope = _slope(lowest)
    if rising < RISES * len(pairs) or slope <= 0:
        return None
    steps = points[-1][0] - points[0][0]
    grown = min(slope * steps, points[-1][1] - points[0][1])
    return Trend(slope, steps, int(grown)) if grown > 0 else None


def _lowest(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    every = max(1, -(-len(points) // COMPARED))
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    # The lowest of each: every third point of what goes up every third step would mislead.
    return [min(group, key=lambda point: point[1]) for group in groups]


def _slope(points: list[tuple[int, float]]) -> float:
    """Return the median slope of all pairs, 0 where there is none; bytes a step."""
    pairs = combinations(points, 2)
    slopes = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs]
    return median(slopes) if slopes else 0.0


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
