"""Detect memory growth from step to step in samples at equal points of the steps; pure, no I/O.

A sample is the minimum of a short time. The shape is that of the *floor*: the rolling minimum of
all later samples. With a leak the floor rises in each of eight stretches by similar amounts. It
does not with noise, a step, a sawtooth (of a garbage collector or of epochs) or a cache that fills.

Rate and interval are Sen's slope (Sen 1968, the median of the slopes of all pairs) and the interval
of Kendall's test, widened for samples that resemble the one before: the variance grows by (1 + r) /
(1 - r), r being the correlation of neighboring residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from stepscope.common.formatting import format_bytes
from stepscope.store.blocks import Floats

STRETCHES = 8
MIN_SAMPLES = 4 * STRETCHES
MIN_STEPS = 64
MAX_RATE = 2.0  # Of a stretch, as a multiple of the mean: above, it was a single step in memory.
MIN_LATE_RATE = 0.6  # Last three rises, as a fraction of the first three: below, a cache fills.
SURE, SHOWN = 3.291, 1.960  # Normal quantiles: the 99.9% interval decides, the 95% one is shown.
MIN_BYTES = {"allocated": 4 * 2**20, "process": 16 * 2**20}  # Growth within the window.
MIN_FRACTION = {"allocated": 0.01, "process": 0.02}  # Of the level before the window.
EARLY_S = {"allocated": 60.0, "process": 300.0}
MIN_EARLY_FRACTION = {"allocated": 0.10, "process": 0.30}
"""The same in windows shorter than EARLY_S: caches and pools fill, garbage is not collected yet."""
MIN_FILLING_FRACTION = 0.25  # Of a process in its first epoch, when a data set's cache may fill.


@dataclass(frozen=True, slots=True)
class AllocatedGrowth:
    """Growth of allocated memory: bytes per step, number of steps, and bytes in total."""

    bytes_per_step: float
    steps: int
    grown: int


class GrowthSource(StrEnum):
    """What grows: torch's allocated memory, this process, or its children."""

    ALLOCATED = "allocated"
    PROCESS = "process"
    WORKERS = "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthTrend:
    """A steady rise: bytes per step with its 95% interval, and the window that shows it."""

    bytes_per_step: float
    low: float
    high: float
    first_step: int
    last_step: int
    level: float  # Bytes at the window's end.

    @property
    def grown(self) -> float:
        """The growth in the window, in bytes."""
        return self.bytes_per_step * (self.last_step - self.first_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Growing memory and its source; `workers` is their memory at the window's end, in bytes."""

    where: GrowthSource
    trend: GrowthTrend
    workers: float = 0.0

    @property
    def text(self) -> str:
        """The rate, its interval and the level, as a sentence."""
        trend = self.trend
        sizes = (trend.bytes_per_step, trend.low, trend.high)
        rate, low, high = (format_bytes(100 * size) for size in sizes)
        name = "The process's memory"
        workers = ""
        if self.where is GrowthSource.ALLOCATED:
            name = "Allocated memory"
        elif self.workers:
            name = "The memory of this process with its workers"
            workers = f"; the workers have {format_bytes(self.workers)}"
        return (
            f"{name} grows by {rate} per 100 steps (95% CI {low} to {high}, "
            f"{trend.last_step - trend.first_step} steps) and is now "
            f"{format_bytes(trend.level)}{workers}."
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
    return trend.grown >= max(MIN_BYTES[kind], fraction * (trend.level - trend.grown))


def find_trend(steps: Floats, values: Floats) -> GrowthTrend | None:
    """Return the rise of `values` (bytes) over steps that do not fall; None if none is certain."""
    if len(steps) < MIN_SAMPLES or steps[-1] - steps[0] < MIN_STEPS:
        return None
    if not _floor_rises_evenly(steps, values):
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
    )


def _floor_rises_evenly(steps: Floats, values: Floats) -> bool:
    """Return True if the minimum of all later values rises by similar amounts."""
    floor = np.minimum.accumulate(values[::-1])[::-1]
    if floor[0] == floor[len(floor) // 4]:  # most series end here, in a few microseconds
        return False
    stretches = np.array_split(np.arange(len(steps)), STRETCHES)
    levels = np.array([np.median(floor[stretch]) for stretch in stretches])
    middles = np.array([np.mean(steps[stretch]) for stretch in stretches])
    widths = np.diff(middles)
    if widths.min() <= 0:
        return False
    rates = np.diff(levels) / widths
    mean = (levels[-1] - levels[0]) / (middles[-1] - middles[0])
    third = len(rates) // 2
    return bool(
        rates.min() > 0
        and rates.max() <= MAX_RATE * mean
        and rates[-third:].mean() >= MIN_LATE_RATE * rates[:third].mean()
    )


Interval = tuple[float, float]


def pair_slopes(steps: Floats, values: Floats) -> Floats:
    """Return the sorted slopes of all pairs of samples; their median is Sen's slope."""
    first, second = np.triu_indices(len(steps), 1)
    apart = steps[second] - steps[first]
    return np.sort((values[second] - values[first])[apart > 0] / apart[apart > 0])


def _sen(steps: Floats, values: Floats) -> tuple[float, Interval, Interval]:
    """Return Sen's slope with its 95% and 99.9% intervals."""
    slopes = pair_slopes(steps, values)
    slope = float(np.median(slopes))
    n = len(steps)
    last = len(slopes) - 1
    deviation = np.sqrt(n * (n - 1) * (2 * n + 5) / 18 * _variance_factor(values - slope * steps))

    def interval(half: float) -> Interval:
        # Beyond the ends: then not even the slope between any two samples is excluded.
        low, high = (len(slopes) - half) / 2, (len(slopes) + half) / 2
        return float(slopes[max(int(low), 0)]), float(slopes[min(int(np.ceil(high)), last)])

    return slope, interval(SHOWN * deviation), interval(SURE * deviation)


def _variance_factor(residuals: Floats) -> float:
    """Return the factor of the variance for residuals that resemble their neighbors."""
    centered = residuals - residuals.mean()
    squares = float(centered @ centered)
    if squares == 0:
        return 1.0
    n = len(residuals)
    correlation = float(centered[:-1] @ centered[1:]) / squares
    # In n values the correlation comes out too low, by about (1 + 4 r) / n.
    corrected = min(max((n * correlation + 1) / (n - 4), 0.0), 0.95)
    return (1 + corrected) / (1 - corrected)
