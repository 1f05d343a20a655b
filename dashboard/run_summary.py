"""What a run came to, in a few numbers: a few frames are read, however long the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dashboard.charts.run_view import world_size_of
from stepscope.metrics import Stream
from stepscope.recorder.rows import RATE, STEP_TIME
from stepscope.run import RunInfo
from stepscope.store import SeriesBlock, StoreError, StoreReader

NEWEST_ROWS = 4096
"""Rows from which the samples of a step are taken: they hardly change within a run."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """None where the run has not recorded the value; bytes are the highest of the run."""

    best_loss: float | None = None
    """The lowest validation loss; the lowest training loss where nothing is validated."""
    samples_per_s: float | None = None
    """Samples of a step by the mean step time of the whole run, the first steps included.

    Of a job: rank 0's times the number of ranks, as all of them take batches of one size.
    """
    peak_allocated: float | None = None
    peak_process: float | None = None


def summarize(run: RunInfo) -> RunSummary:
    """Return the summary of what the run has stored so far, an empty one without a store."""
    try:
        with StoreReader(run.folder) as reader:
            whole = {
                info.stream: reader.read(info.id, 0, info.rows, 1 << info.rows.bit_length())
                for info in reader.series()
                if info.stream in (Stream.STEPS, Stream.SAMPLES)
            }
            each_step = samples_of_a_step(reader)
    except StoreError:
        return RunSummary()
    ranks = world_size_of(run.run_json)
    steps, samples = whole.get(Stream.STEPS), whole.get(Stream.SAMPLES)
    step_time = _of(steps, "mean", STEP_TIME)
    validated = _of(steps, "low", "val/loss")
    return RunSummary(
        best_loss=_of(steps, "low", "train/loss") if validated is None else validated,
        samples_per_s=ranks * each_step / step_time if each_step and step_time else None,
        peak_allocated=_of(samples, "high", "memory/peak_allocated"),
        peak_process=_of(samples, "high", "process/rss"),
    )


def samples_of_a_step(reader: StoreReader) -> float | None:
    """Return the mean of rate times step time: a mean of rates alone favors the shortest steps."""
    for info in reader.series():
        if info.stream == Stream.STEPS:
            block = reader.read(info.id, max(0, info.rows - NEWEST_ROWS), info.rows, 1)
            if not {RATE, STEP_TIME} <= set(block.keys):
                return None
            rates, seconds = (block.mean[block.keys.index(key)] for key in (RATE, STEP_TIME))
            samples = (rates * seconds)[np.isfinite(rates * seconds)]
            return float(samples.mean()) if len(samples) else None
    return None


def _of(block: SeriesBlock | None, statistic: str, key: str) -> float | None:
    """Return a statistic of a metric over the block's one bucket."""
    if block is None or key not in block.keys or len(block) == 0:
        return None
    index = block.keys.index(key)
    return float(getattr(block, statistic)[index, -1]) if block.count[index, -1] else None
