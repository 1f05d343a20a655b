"""Summary of a run in a few numbers; it reads a few frames, however long the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dashboard.charts.run_view import world_size_of
from stepscope.metrics import Stream
from stepscope.recorder.rows import RATE, STEP_TIME
from stepscope.run import RunInfo
from stepscope.run.retention import folder_size
from stepscope.store import SeriesBlock, StoreError, StoreReader

NEWEST_ROWS = 4096  # Rows that give the samples per step: it hardly changes within a run.


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Values of a whole run; None if not recorded, peaks and `size` in bytes.

    `size` is the sum of the folder's files. `best_loss` is the lowest validation loss, or the
    lowest training loss without validation. `samples_per_s` is samples per step by the mean step
    time, the first steps included; of a distributed run rank 0's times the number of ranks, as all
    take batches of one size.
    """

    best_loss: float | None = None
    samples_per_s: float | None = None
    peak_allocated: float | None = None
    peak_process: float | None = None
    size: int | None = None


def summarize(run: RunInfo) -> RunSummary:
    """Return the summary of the stored data, only the size without a store."""
    try:
        with StoreReader(run.folder) as reader:
            whole = {
                info.stream: reader.read(info.id, 0, info.rows, 1 << info.rows.bit_length())
                for info in reader.series()
                if info.stream in (Stream.STEPS, Stream.SAMPLES)
            }
            each_step = samples_of_a_step(reader)
    except StoreError:
        return RunSummary(size=folder_size(run.folder))
    steps, samples = whole.get(Stream.STEPS), whole.get(Stream.SAMPLES)
    step_time = _of(steps, "mean", STEP_TIME)
    validated = _of(steps, "low", "val/loss")
    rate = world_size_of(run.run_json) * each_step / step_time if each_step and step_time else None
    return RunSummary(
        best_loss=_of(steps, "low", "train/loss") if validated is None else validated,
        samples_per_s=rate,
        peak_allocated=_of(samples, "high", "memory/peak_allocated"),
        peak_process=_of(samples, "high", "process/rss"),
        size=folder_size(run.folder),
    )


def samples_of_a_step(reader: StoreReader) -> float | None:
    """Return the mean of rate times step time: a mean of rates alone favors the shortest steps."""
    info = next((info for info in reader.series() if info.stream == Stream.STEPS), None)
    if info is None:
        return None
    block = reader.read(info.id, max(0, info.rows - NEWEST_ROWS), info.rows, 1)
    if not {RATE, STEP_TIME} <= set(block.keys):
        return None
    rates, seconds = (block.mean[block.keys.index(key)] for key in (RATE, STEP_TIME))
    samples = (rates * seconds)[np.isfinite(rates * seconds)]
    return float(samples.mean()) if len(samples) else None


def _of(block: SeriesBlock | None, statistic: str, key: str) -> float | None:
    """Return a statistic of a metric over the block's one bucket."""
    if block is None or key not in block.keys or len(block) == 0:
        return None
    index = block.keys.index(key)
    return float(getattr(block, statistic)[index, -1]) if block.count[index, -1] else None
