"""The values of a whole run, from a few reduced reads of its store, however long the run.

Samples/s are samples divided by the time of all steps. Times are medians over nine tenths of the
steps: the first tenth, and at least the first step, is warm-up, in which kernels load, the
allocator grows and torch.compile compiles. The samples/s of a job are those of rank 0 times the
number of ranks, as all ranks take batches of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.common.metrics import HIGHER_IS_BETTER, LOWER_IS_BETTER, Stream
from stepscope.store import SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.blocks import LOSS, RATE, STEP_TIME, Floats

MAX_BUCKETS = 512  # of a reduced read: one to two frames of the store
MAX_METRICS = 64  # of one run
PEAKS = {
    "peak_allocated": "memory/peak_allocated",
    "peak_reserved": "memory/peak_reserved",
    "peak_process": "process/rss",
}


def final_values(folder: Path, run_json: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return `final` and `totals` of run.json (docs/storage.md). Raises StoreError."""
    with StoreReader(folder) as reader:
        of_steps = reader.find(Stream.STEPS)
        steps = reduced(reader, of_steps)
        newest = read_newest(reader, of_steps)
        memory = peaks(reduced(reader, reader.find(Stream.SAMPLES)))
        gpu = reader.find(Stream.DEVICES, str(run_json.get("device")))
        joules, _ = energy_of(reduced(reader, gpu))
    ranks = run_json.get("world_size") or 1
    totals = {"steps": int(newest.step[-1]) if len(newest) else None} | memory
    totals["samples_per_s"] = samples_per_second(steps, newest, ranks)
    totals["energy"] = joules if ranks == 1 else None  # a job uses several GPUs
    keys = [key for key in steps.keys if not key.startswith("perf/")][:MAX_METRICS]
    return {
        "final": metrics_of(steps, newest, keys),
        "totals": {name: value for name, value in totals.items() if value is not None},
    }


def bucket_for(rows: int, most: int) -> int:
    """Return the smallest power of two that puts `rows` rows into at most `most` buckets."""
    return 1 << (max(1, -(-rows // most)) - 1).bit_length()


def reduced(reader: StoreReader, info: SeriesInfo) -> SeriesBlock:
    """Return a whole series in at most MAX_BUCKETS buckets."""
    return reader.read(info.id, 0, info.rows, bucket_for(info.rows, MAX_BUCKETS))


def highest(block: SeriesBlock) -> dict[str, float]:
    """Return the maximum of each metric with finite values."""
    finite = {
        key: high[np.isfinite(high)] for key, high in zip(block.keys, block.high, strict=True)
    }
    return {key: float(high.max()) for key, high in finite.items() if len(high)}


def read_newest(reader: StoreReader, info: SeriesInfo) -> SeriesBlock:
    return reader.read(info.id, max(0, info.rows - MAX_BUCKETS), info.rows, 1)


def column(block: SeriesBlock, key: str, statistic: str = "mean") -> tuple[Floats, Floats]:
    """Return the finite values of a metric and the number of rows of each bucket."""
    if key not in block.keys:
        return np.empty(0), np.empty(0)
    row = block.keys.index(key)
    at = np.flatnonzero(block.count[row])
    return getattr(block, statistic)[row][at], block.count[row][at]


def typical(block: SeriesBlock, key: str) -> float | None:
    """Return the median of the means of nine tenths of a run: all but the first, or first step."""
    values, counts = column(block, key)
    if len(values) < 2:
        return float(values[0]) if len(values) else None
    tenths = zip(np.array_split(values, 10), np.array_split(counts, 10), strict=True)
    means = [np.average(tenth, weights=rows) for tenth, rows in tenths if len(tenth)]
    return float(np.median(means[1:]))


def samples_of_steps(newest: SeriesBlock) -> Floats:
    """Return the samples of each of the newest steps that has some: rate times step time."""
    rates, seconds = newest.with_keys((RATE, STEP_TIME)).mean
    samples: Floats = rates * seconds
    return samples[np.isfinite(samples)]


def samples_per_second(steps: SeriesBlock, newest: SeriesBlock, ranks: int) -> float | None:
    """Return the samples of all ranks divided by the time of all steps; None without samples.

    The mean of the rates would be higher: it counts a slow step as much as a fast one. A bucket has
    no number of samples, so each step of a long run has the mean of the newest ones.
    """
    samples = samples_of_steps(newest)
    _, rated = column(steps, RATE)
    seconds, timed = column(steps, STEP_TIME)
    total_s = float((seconds * timed).sum())
    if not len(samples) or not total_s > 0:
        return None
    return ranks * float(samples.mean() * rated.sum()) / total_s


def peaks(samples: SeriesBlock) -> dict[str, float | None]:
    """Return the highest value in bytes of each metric of PEAKS."""
    highs = highest(samples)
    return {name: highs.get(key) for name, key in PEAKS.items()}


def energy_of(devices: SeriesBlock) -> tuple[float | None, float | None]:
    """Return the energy of a GPU in J and its mean power in W."""
    row = devices.with_keys(("gpu/energy",))
    at = np.flatnonzero(row.count[0])
    if len(at) < 2 or row.ts[at[-1]] <= row.ts[at[0]]:
        return None, None
    joules = float(row.high[0, at[-1]] - row.low[0, at[0]])
    return joules, joules / float(row.ts[at[-1]] - row.ts[at[0]])


def metrics_of(
    steps: SeriesBlock, newest: SeriesBlock, keys: Iterable[str]
) -> dict[str, dict[str, float | None]]:
    """Return `last` of each metric, None if not finite, and `best` of those with a direction.

    The last training loss is the mean over the last tenth of its steps: one batch's is noise. A
    metric that the newest rows lack has the mean of its last bucket.
    """
    found: dict[str, dict[str, float | None]] = {}
    for key in keys:
        block = newest if last_value(newest, key) is not None else steps
        if (last := last_value(block, key)) is None:
            continue
        values, counts = column(steps, key)
        if key == LOSS and np.isfinite(last):
            tenth = np.cumsum(counts) > 0.9 * counts.sum()
            last = float(np.average(values[tenth], weights=counts[tenth]))
        found[key] = {"last": last if np.isfinite(last) else None}
        if len(values) and key in LOWER_IS_BETTER:
            found[key]["best"] = float(column(steps, key, "low")[0].min())
        elif len(values) and key in HIGHER_IS_BETTER:
            found[key]["best"] = float(column(steps, key, "high")[0].max())
    return found


def last_value(block: SeriesBlock, key: str) -> float | None:
    """Return the last value of a metric, NaN if not finite; None without one."""
    if key not in block.keys:
        return None
    row = block.keys.index(key)
    at = np.flatnonzero(block.count[row] + block.nonfinite[row])[-1:]
    if not len(at):
        return None
    return float("nan" if block.nonfinite[row, at[0]] else block.mean[row, at[0]])
