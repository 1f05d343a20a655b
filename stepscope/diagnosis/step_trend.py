"""Whether the steps of a run become slower."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.common.metrics import Stream
from stepscope.diagnosis.code_time import delay_share
from stepscope.distributed.stragglers.step_phases import FIRST_STEPS
from stepscope.memory.growth import STRETCHES
from stepscope.session.training_facts import TrainingFacts
from stepscope.store import StoreReader
from stepscope.store.blocks import STEP_TIME, Floats

MIN_STEPS = 12 * STRETCHES
MAX_BUCKETS = 1024  # of the step times of a run
MIN_SPAN_S = 3.0
MIN_RATIO, MIN_SURE_RATIO = 1.5, 1.2
"""Minimum ratio of the step time at the end to that at the start: of medians, and of quartiles."""
BUSY, MIN_BUSY_RATIO = 0.05, 2.0
"""On a host whose cores are taken for that fraction of the time, a step's own time must double:
programs on the other thread of a core, or in its cache, slow it too, which no counter shows."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Step times at the start and the end of a run, in seconds."""

    start_s: float
    end_s: float

    @property
    def ratio(self) -> float:
        """The step time at the end as a multiple of that at the start."""
        return self.end_s / self.start_s


def find_slowdown(reader: StoreReader, facts: TrainingFacts | None) -> Slowdown | None:
    """Return how a run became slower; None if it did not. Raises StoreError."""
    info = reader.find(Stream.STEPS)
    if info is None or info.rows < MIN_STEPS + FIRST_STEPS:
        return None
    bucket = 1
    while info.rows / bucket > MAX_BUCKETS:
        bucket *= 2
    block = reader.read(info.id, FIRST_STEPS, info.rows, bucket)
    times = block.with_keys((STEP_TIME,)).mean[0]
    timed = np.flatnonzero(np.isfinite(times) & (times > 0))
    if len(timed) < MIN_STEPS or block.ts[timed[-1]] - block.ts[timed[0]] < MIN_SPAN_S:
        return None
    found = slowdown_of(times[timed])
    # Other programs of the host may take the core: that is contention.
    return found if facts is None or is_of_script(facts) else None


def slowdown_of(times: Floats) -> Slowdown | None:
    """Return the slowdown of step times (n,) in seconds; None if none is certain."""
    stretches = np.array_split(times, STRETCHES)
    medians = np.array([np.median(stretch) for stretch in stretches])
    start_s, end_s = float(medians[0]), float(medians[-1])
    # Half of the steps at the start are below, and half of those at the end above these.
    usual_start_s = float(np.quantile(stretches[0], 0.75))
    usual_end_s = float(np.quantile(stretches[-1], 0.25))
    rises_late = medians[-2] >= MIN_SURE_RATIO * medians[:2].max()
    is_slower = end_s >= MIN_RATIO * start_s and usual_end_s >= MIN_SURE_RATIO * usual_start_s
    return Slowdown(start_s, end_s) if is_slower and rises_late else None


def is_of_script(facts: TrainingFacts) -> bool:
    """Return True if steps became slower also without what other programs cost them."""
    is_busy = delay_share(facts) >= BUSY
    return _ratio_without_delay(facts) >= (MIN_BUSY_RATIO if is_busy else MIN_SURE_RATIO)


def _ratio_without_delay(facts: TrainingFacts) -> float:
    """Return the ratio of step times of the last and first third, without waits for a core."""
    periods = facts.periods
    third = len(periods) // 3
    if third < 1 or not any(period.wall_s for period in periods):
        return np.inf
    steps = np.diff([0, *(period.step for period in periods)])
    busy = np.array([period.wall_s - period.delay_s for period in periods])
    # The steps before the first sample are not in the first period.
    first = busy[1 : third + 1].sum() / max(1, steps[1 : third + 1].sum())
    last = busy[-third:].sum() / max(1, steps[-third:].sum())
    return float(last / first) if first > 0 else np.inf
