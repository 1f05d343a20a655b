"""Decide whether memory grows from step to step, from readings at equal points of the steps. Pure.

A reading is the lowest of a short time. The shape is judged on the *floor*: the least reading from
a point on. With a leak it rises in each of eight stretches of about equal length, by similar
amounts. Stationary noise, a step (a validation's workspace, another batch size), the sawtooth of a
garbage collector or of epochs, and a cache that fills up do not look like that.

Rate and interval are Sen's slope (Sen 1968, the median of the slopes of all pairs) and the interval
of Kendall's test, widened for readings that resemble the one before: the variance grows by
(1 + r) / (1 - r), r being the correlation of neighboring residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from stepscope.common.formatting import format_bytes
from stepscope.store.blocks import Floats

STRETCHES = 8
LEAST_READINGS = 4 * STRETCHES
LEAST_STEPS = 64
STEEPEST = 2.0
"""A stretch rises by at most so many times the mean: else it was a step that memory took."""
FADING = 0.6
"""Rate of the last three rises in terms of the first three, at least: less is a filling cache."""
SURE, SHOWN = 3.291, 1.960
"""Normal quantiles: memory grows if the 99.9 % interval is above zero; the 95 % one is shown."""
LEAST_BYTES = {"allocated": 4 * 2**20, "process": 16 * 2**20}
LEAST_SHARE = {"allocated": 0.01, "process": 0.02}
"""What the growth amounts to within the window, at least: in bytes, and in terms of the level."""
EARLY_S = {"allocated": 60.0, "process": 300.0}
EARLY_SHARE = {"allocated": 0.05, "process": 0.15}
"""The same in windows shorter than this: caches and pools fill, garbage waits for its collector."""
UNCOLLECTED = 2.0  # Factor of that while the garbage collector has had no full run.
FILLING_SHARE = 0.25
"""The same for a process in its first epoch, when a data set may still be filling its cache."""


class GrowthSource(StrEnum):
    """What grows: torch's allocated memory, this process, or its children."""

    ALLOCATED = "allocated"
    PROCESS = "process"
    WORKERS = "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthTrend:
    """A rise that goes on: bytes per step, its 95 % interval, and the window that shows it."""

    bytes_per_step: float
    low: float
    high: float
    first_step: int
    last_step: int
    level: float  # Bytes at the window's end.
    evenness: float = 1.0  # The slowest stretch in terms of the mean: 1 where all rise alike.

    @property
    def steps(self) -> int:
        """The steps that the window spans."""
        return self.last_step - self.first_step

    @property
    def grown(self) -> float:
        """Bytes that came in the window."""
        return self.bytes_per_step * self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Memory that grows, and where."""

    where: GrowthSource
    trend: GrowthTrend
    collections: int | None = None
    """Full runs of Python's garbage collector in the window; None where not known."""
    workers: float | None = None
    """Bytes that the worker processes have at the window's end, of a process that has some."""
    workers_grown: float | None = None  # Bytes of the growth that came in the worker processes.

    @property
    def text(self) -> str:
        """How much, and how sure."""
        trend = self.trend
        sizes = (trend.bytes_per_step, trend.low, trend.high)
        rate, low, high = (format_bytes(100 * size) for size in sizes)
        name = "The process's memory"
        if self.where is GrowthSource.ALLOCATED:
            name = "Allocated memory"
        elif self.where is GrowthSource.WORKERS or self.workers:
            name = "The memory of this process with its workers"
        share = ""
        if self.workers and self.workers_grown is not None and trend.grown > 0:
            part = min(1.0, max(0.0, self.workers_grown / trend.grown))
            held = format_bytes(self.workers)
            share = f": the workers have {held}, and {100 * part:.0f} % of the growth"
        return (
            f"{name} grows by {rate} per 100 steps (95 % CI {low} to {high}, "
            f"{trend.steps} steps) and is now {format_bytes(trend.level)}{share}."
        )

    @property
    def next(self) -> str:
        """What to look at."""
        advice = _ADVICE[self.where]
        if self.where is not GrowthSource.WORKERS and self.collections == 0:
            return f"{advice} {_CYCLES}"
        return advice

    @property
    def data(self) -> dict[str, Any]:
        """The data of the event."""
        return {
            "where": self.where.value,
            **asdict(self.trend),
            "steps": self.trend.steps,
            "collections": self.collections,
            "workers": self.workers,
            "workers_grown": self.workers_grown,
            "next": self.next,
        }


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
        "it has read."
    ),
    GrowthSource.WORKERS: (
        "Each worker copies the dataset pages it touches: reading a long list or dict of "
        "Python objects changes their reference counts. Store them in one array or tensor, use "
        "fewer workers, or check what the dataset keeps per sample."
    ),
}
_CYCLES = (
    "Python's garbage collector has not run in full meanwhile: if Collect garbage frees it, "
    "reference cycles hold it."
)


def is_material(
    trend: GrowthTrend, kind: str, seconds: float, *, filling: bool = False, collected: bool = True
) -> bool:
    """Say whether the growth of a window of so many seconds is worth telling.

    `kind` is "allocated" or "process"; `filling` says that this is the first epoch, `collected`
    that Python's garbage collector has had a full run in the window.
    """
    share = LEAST_SHARE[kind]
    if seconds < EARLY_S[kind]:
        share = EARLY_SHARE[kind] * (1 if collected else UNCOLLECTED)
    if filling:
        share = max(share, FILLING_SHARE)
    before = trend.level - trend.grown
    return trend.grown >= max(LEAST_BYTES[kind], share * before)


def may_rise(values: Sequence[float]) -> bool:
    """Say whether `find_trend` may find something; most series are done with here, in 5 us.

    Where a quarter's lowest is not below that of the next, the floor is level in all of it.
    """
    size = len(values) // 4
    lows = [min(values[size * i : size * (i + 1)], default=0.0) for i in range(4)]
    return lows[0] < lows[1] < lows[2] < lows[3]


def find_trend(steps: Floats, values: Floats) -> GrowthTrend | None:
    """Return the rise of these readings (bytes) over their steps, None where none is certain.

    Both are of one length and in the order of time; steps do not fall.
    """
    if len(steps) < LEAST_READINGS or steps[-1] - steps[0] < LEAST_STEPS:
        return None
    evenness = _evenness(steps, values)
    if evenness is None:
        return None
    slope, shown, sure = _sen(steps, values)
    if sure[0] <= 0 or shown[1] - shown[0] > slope:
        return None
    return GrowthTrend(
        bytes_per_step=slope,
        low=shown[0],
        high=shown[1],
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        level=float(values[-1]),
        evenness=evenness,
    )


def _evenness(steps: Floats, values: Floats) -> float | None:
    """Return how even the rises of the floor from stretch to stretch are; None for no growth.

    It has to rise in each of them, never by far the most in one, and at the end as well.
    """
    floor = np.minimum.accumulate(values[::-1])[::-1]
    parts = np.array_split(np.arange(len(steps)), STRETCHES)
    levels = np.array([np.median(floor[part]) for part in parts])
    middles = np.array([np.mean(steps[part]) for part in parts])
    wide = np.diff(middles)
    if wide.min() <= 0:
        return None
    rates = np.diff(levels) / wide
    mean = (levels[-1] - levels[0]) / (middles[-1] - middles[0])
    third = len(rates) // 2
    rises = (
        rates.min() > 0
        and rates.max() <= STEEPEST * mean
        and rates[-third:].mean() >= FADING * rates[:third].mean()
    )
    return float(rates.min() / mean) if rises else None


Interval = tuple[float, float]


def _sen(steps: Floats, values: Floats) -> tuple[float, Interval, Interval]:
    """Return Sen's slope with its 95 % and 99.9 % intervals."""
    one, other = np.triu_indices(len(steps), 1)
    apart = steps[other] - steps[one]
    slopes = np.sort((values[other] - values[one])[apart > 0] / apart[apart > 0])
    slope = float(np.median(slopes))
    n = len(steps)
    deviation = np.sqrt(n * (n - 1) * (2 * n + 5) / 18 * _widening(values - slope * steps))
    # Beyond the ends: then not even the slope between any two readings is excluded.
    shown, sure = (
        (
            float(slopes[max(int(np.floor((len(slopes) - half) / 2)), 0)]),
            float(slopes[min(int(np.ceil((len(slopes) + half) / 2)), len(slopes) - 1)]),
        )
        for half in (SHOWN * deviation, SURE * deviation)
    )
    return slope, shown, sure


def _widening(left: Floats) -> float:
    """Return the factor of the variance for residuals that resemble their neighbors."""
    centered = left - left.mean()
    whole = float(centered @ centered)
    if whole == 0:
        return 1.0
    n = len(left)
    found = float(centered[:-1] @ centered[1:]) / whole
    # In n values the correlation comes out too low, by about (1 + 4 r) / n.
    likeness = min(max((n * found + 1) / (n - 4), 0.0), 0.95)
    return (1 + likeness) / (1 - likeness)


LONGER = 0.5
"""Growth of what steps take for a time, in terms of the floor's, from which batches get longer."""


def batches_grow(steps: Floats, floors: Floats, peaks: Floats) -> bool:
    """Say whether what steps take for a time grows with the floor, as where batches get longer.

    The last batch is still there at a boundary, so longer ones raise the floor as well. What is
    kept from step to step raises floor and peak alike: then their distance stays as it was. It has
    to grow in both halves: a single large step is no sign.
    """
    above = peaks - floors
    quarters = np.array_split(np.arange(len(steps)), 4)
    rises = [
        (
            np.median(values[quarters[1]]) - np.median(values[quarters[0]]),
            np.median(values[quarters[3]]) - np.median(values[quarters[2]]),
        )
        for values in (above, floors)
    ]
    return all(more > LONGER * floor for more, floor in zip(*rises, strict=True))
