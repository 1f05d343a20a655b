"""Detect memory growth from step to step in samples at equal points of the steps; pure, no I/O.

A sample is the minimum of a short time. The shape is that of the *floor*: the rolling minimum of
all later samples. With a leak the floor rises in each of eight stretches by similar amounts. It
does not with noise, a step, a sawtooth (of a garbage collector or of epochs) or a cache that fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from stepscope.common.formatting import format_bytes
from stepscope.store.blocks import Floats

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
