"""The figures of a run's newest steady steps, read from a few frames of its store."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.common.metrics import Stream
from stepscope.diagnosis.code_time import delay_share
from stepscope.diagnosis.results import MIN_STEPS, StepAverages
from stepscope.distributed.stragglers.detect import WINDOW_S
from stepscope.distributed.stragglers.step_phases import FIRST_STEPS
from stepscope.gpu.health import throttle_words
from stepscope.memory.growth import STRETCHES
from stepscope.run_setup import training_gpu
from stepscope.session.training_facts import TrainingFacts
from stepscope.store import SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.blocks import STEP_TIME, Floats
from stepscope.store.final_values import highest, reduced

WINDOW_STEPS = 512  # Number of newest steps that are read: one or two frames of the store.
LEAST_S = 3.0  # Minimum time span of short steps, so that the sampler has enough samples in it.
MOST_STEPS = 16384  # Maximum number of steps for LEAST_S: 3 s of 0.2 ms each, read in some 10 ms.
READINGS = 4096  # Maximum number of newest samples that are read: seven minutes at 10 Hz.
OF_STEPS = (
    STEP_TIME,
    "perf/data_wait",
    "perf/h2d",
    "perf/gpu_time",
    "perf/gpu_wait",
    "perf/forward",
    "perf/backward",
    "perf/optimizer",
)
OF_DEVICES = ("gpu/util", "gpu/throttle_reasons", "gpu/sm_clock")
MOST_OF_WAIT, FEW_STEPS = 0.8, 0.15  # Fractions: so much of the wait in so few of the steps.
MIN_READINGS = 10  # Minimum number of samples of a mean: one second at 10 Hz.


def recent_figures(reader: StoreReader, run_json: Mapping[str, Any]) -> StepAverages:
    """Return the figures of the newest steady steps, without pauses. Raises StoreError."""
    steps = _steady(reader, reader.find(Stream.STEPS))
    if not len(steps):
        return StepAverages(steps=0)
    of_steps = steps.with_keys(OF_STEPS).mean
    times, data_wait, copies, device_time, gpu_wait, *computing = of_steps
    samples = _during(steps, times, reader, reader.find(Stream.SAMPLES))
    gpu = reader.find(Stream.DEVICES, training_gpu(run_json) or "")
    devices = _during(steps, times, reader, gpu)
    process_cpu, host_cpu = samples.with_keys(("process/cpu", "host/cpu")).mean
    utilization, masks, sm_clock = devices.with_keys(OF_DEVICES).mean
    masks = masks[np.isfinite(masks)]
    words = [throttle_words(int(mask)) for mask in masks]
    enough = len(masks) >= MIN_READINGS
    return StepAverages(
        steps=len(times),
        step_time=float(times.mean()),
        data_wait=_mean(data_wait),
        long_waits=_long_waits(data_wait),
        computing=_sum_of_means(computing),
        copies=_mean(copies, min(MIN_READINGS, len(copies) / 2)),
        device_time=_mean(device_time),
        gpu_wait=_mean(gpu_wait),
        utilization=_mean(utilization / 100, MIN_READINGS),
        process_cpu=_mean(process_cpu / 100, MIN_READINGS),
        host_cpu=_mean(host_cpu / 100, 1),  # read once a second
        throttled=sum(map(bool, words)) / len(words) if enough else None,
        throttle_words=tuple(dict.fromkeys(itertools.chain(*words))),
        sm_clock=_mean(sm_clock),
        sm_clock_max=highest(reduced(reader, gpu)).get("gpu/sm_clock"),
    )


def _steady(reader: StoreReader, info: SeriesInfo) -> SeriesBlock:
    """Return the steps of the window with a step time."""
    block = _newest(reader, info)
    timed = np.flatnonzero(block.with_keys((STEP_TIME,)).mean[0] > 0)
    if not len(timed):
        return block.slice(0, 0)
    young = np.count_nonzero(block.ts[timed] > block.ts[timed[-1]] - WINDOW_S)
    return _rows(block, timed[-max(MIN_STEPS, int(young)) :])


def _newest(reader: StoreReader, info: SeriesInfo) -> SeriesBlock:
    """Return the newest WINDOW_STEPS rows of steps, or more up to a span of LEAST_S."""
    first = max(FIRST_STEPS, info.rows - WINDOW_STEPS)
    block = reader.read(info.id, first, info.rows, 1)
    if first == FIRST_STEPS or block.ts[-1] - block.ts[0] >= LEAST_S:
        return block
    last = float(block.ts[-1])
    start, _ = reader.rows_between(info.id, "time", last - LEAST_S, last)
    first = max(FIRST_STEPS, info.rows - MOST_STEPS, min(first, start))
    return reader.read(info.id, first, info.rows, 1)


def _during(
    steps: SeriesBlock, times: Floats, reader: StoreReader, info: SeriesInfo
) -> SeriesBlock:
    """Return the samples taken within the steps, not between them."""
    begin, end = float(steps.ts[0] - times[0]), float(steps.ts[-1])
    start, stop = reader.rows_between(info.id, "time", begin, end)
    block = reader.read(info.id, max(start, stop - READINGS), stop, 1)
    after = np.searchsorted(steps.ts, block.ts)
    known = np.minimum(after, len(times) - 1)
    inside = (after < len(times)) & (block.ts >= steps.ts[known] - times[known])
    return _rows(block, np.flatnonzero(inside))


def _rows(block: SeriesBlock, chosen: NDArray[np.intp]) -> SeriesBlock:
    return SeriesBlock(block.keys, *(part[..., chosen] for part in block.arrays()))


def _long_waits(waits: Floats) -> tuple[int, float] | None:
    """Return the number and mean of few waits that take most of the time; None without."""
    waits = np.sort(waits[np.isfinite(waits)])[::-1]
    if not len(waits) or waits.sum() <= 0:
        return None
    count = int(np.searchsorted(np.cumsum(waits), MOST_OF_WAIT * waits.sum())) + 1
    return (count, float(waits[:count].mean())) if count <= FEW_STEPS * len(waits) else None


def _sum_of_means(phases: Sequence[Floats]) -> float | None:
    """Return the mean time of all phases together; None if one is not recorded."""
    means = [_mean(phase) for phase in phases]
    known = [mean for mean in means if mean is not None]
    return sum(known) if len(known) == len(means) else None


def _mean(values: Floats, least: float | None = None) -> float | None:
    """Return the mean of the finite values; None for fewer than `least`, by default half."""
    finite = values[np.isfinite(values)]
    enough = len(finite) >= (len(values) / 2 if least is None else least)
    return float(finite.mean()) if len(finite) and enough else None


MIN_TREND_STEPS = 12 * STRETCHES
MAX_BUCKETS = 1024  # of the step times of a run
MIN_SPAN_S, MIN_STEADY_SPAN_S = 3.0, 1.0
"""Minimum spans: of any rise, and of one from each stretch to the next."""
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


def find_slowdown(reader: StoreReader, facts: TrainingFacts | None) -> Slowdown | None:
    """Return how a run became slower; None if it did not. Raises StoreError."""
    info = reader.find(Stream.STEPS)
    if info is None or info.rows < MIN_TREND_STEPS + FIRST_STEPS:
        return None
    bucket = 1
    while info.rows / bucket > MAX_BUCKETS:
        bucket *= 2
    block = reader.read(info.id, FIRST_STEPS, info.rows, bucket)
    times = block.with_keys((STEP_TIME,)).mean[0]
    timed = np.flatnonzero(np.isfinite(times) & (times > 0))
    if len(timed) < MIN_TREND_STEPS:
        return None
    span_s = float(block.ts[timed[-1]] - block.ts[timed[0]])
    is_steady = bool((np.diff(_medians(times[timed])) > 0).all())
    if span_s < (MIN_STEADY_SPAN_S if is_steady else MIN_SPAN_S):
        return None
    found = slowdown_of(times[timed])
    # Other programs of the host may take the core: that is contention.
    return found if facts is None or is_of_script(facts) else None


def _medians(times: Floats) -> Floats:
    """Return the median of each stretch of the step times."""
    return np.array([np.median(stretch) for stretch in np.array_split(times, STRETCHES)])


def slowdown_of(times: Floats) -> Slowdown | None:
    """Return the slowdown of step times (n,) in seconds; None if none is certain."""
    stretches = np.array_split(times, STRETCHES)
    medians = _medians(times)
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
