"""The memory breakdown over time: the series of a process and of its GPU on one time axis.

A reading is a row of the process's series, with the GPU's row nearest in time. Values that are read
less often are held from the last sample, up to `HOLD_S`, some up to `LONGER_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.common.metrics import Stream
from stepscope.memory.breakdown import TENSORS, CategoryBytes, MemoryDomain, divide
from stepscope.store import SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.blocks import Floats
from stepscope.store.final_values import bucket_for, highest, reduced

HOLD_S = 5.0  # Maximum age of a value: most are read once a second, and a tick may be late.
LONGER_S = {"process/children_rss": 20.0} | dict.fromkeys(TENSORS, 60.0)
"""Maximum age of values that are read less often: many workers, tensors between long steps."""
NEWEST_ROWS = 648  # Read for the newest breakdown: values are held for 64 s at 10 Hz.
MAX_NEWEST_GAP = 8  # Newest rows of which at least one has consistent values.

_READ_EACH_TICK = {
    MemoryDomain.DEVICE: ("memory/reserved", "memory/allocated", "memory/inactive_split"),
    MemoryDomain.HOST: ("process/rss",),
}
"""Metrics that are read at every tick: they count in their own row only."""
_HELD = {
    MemoryDomain.DEVICE: TENSORS,
    MemoryDomain.HOST: ("host/mem_total", "host/mem_used", "process/children_rss", *TENSORS),
}
_OF_THE_GPU = ("gpu/mem_total", "gpu/mem_used", "gpu/mem_reserved", "gpu/mem_others")


@dataclass(frozen=True, slots=True)
class BreakdownReading:
    """The breakdown at a time (epoch seconds) and step; `categories` is None if unknown."""

    ts: float
    step: int
    categories: CategoryBytes | None


@dataclass(frozen=True, slots=True)
class BreakdownSource:
    """The series of a process and its GPU."""

    place: MemoryDomain
    samples: SeriesInfo
    device: SeriesInfo | None


def breakdown_source(series: Iterable[SeriesInfo], gpu: str | None) -> BreakdownSource | None:
    """Return the source of the breakdown, None before any sample; `gpu` is None for the CPU."""
    by_source = {(info.stream, info.source): info for info in series}
    samples = by_source.get((Stream.SAMPLES.value, ""))
    if samples is None:
        return None
    place = MemoryDomain.HOST if gpu is None else MemoryDomain.DEVICE
    device = by_source.get((Stream.DEVICES.value, gpu or ""))
    return BreakdownSource(place, samples, None if gpu is None else device)


def read_breakdown(
    reader: StoreReader, source: BreakdownSource, max_readings: int
) -> list[BreakdownReading]:
    """Return the breakdown of the whole run, of a long run's means. Raises StoreError."""
    return _read(reader, source, 0, bucket_for(source.samples.rows, max_readings))


def newest_breakdown(reader: StoreReader, source: BreakdownSource) -> BreakdownReading | None:
    """Return the newest known breakdown; None if the newest rows have none. Raises StoreError."""
    readings = _read(reader, source, max(0, source.samples.rows - NEWEST_ROWS), 1)
    newest = reversed(readings[-MAX_NEWEST_GAP:])
    return next((reading for reading in newest if reading.categories is not None), None)


_TENSOR_PEAKS = {key.removeprefix("memory/"): (key,) for key in TENSORS}
PEAK_METRICS: Mapping[MemoryDomain, Mapping[str, tuple[str, ...]]] = {
    MemoryDomain.DEVICE: {
        "driver": ("gpu/mem_reserved",),
        "others": ("gpu/mem_others",),
        "process": ("memory/process_used",),
        "reserved": ("memory/peak_reserved", "memory/reserved"),
        "allocated": ("memory/peak_allocated", "memory/allocated"),
        **_TENSOR_PEAKS,
    },
    MemoryDomain.HOST: {
        "process": ("process/peak_rss", "process/rss"),
        "workers": ("process/children_rss",),
        **_TENSOR_PEAKS,
    },
}
"""The metrics whose maximum is the peak of a category, or of a sum of categories."""


def peaks(reader: StoreReader, source: BreakdownSource) -> CategoryBytes:
    """Return each category's own peak in bytes; differences have none. Raises StoreError."""
    highs = highest(reduced(reader, source.samples))
    if source.device is not None:
        highs |= highest(reduced(reader, source.device))
    if highs.get("memory/gradients") == 0:  # No reading found any: zero_grad() freed them before.
        del highs["memory/gradients"]
    return {
        part: int(max(highs[key] for key in metrics if key in highs))
        for part, metrics in PEAK_METRICS[source.place].items()
        if highs.keys() & set(metrics)
    }


def _read(
    reader: StoreReader, source: BreakdownSource, start: int, bucket: int
) -> list[BreakdownReading]:
    """Return the breakdown at each row from `start` on.

    A row without a value that recent rows have has no breakdown: lines continue over it. If the
    value stays missing, its categories are merged with others.
    """
    samples = reader.read(source.samples.id, start, source.samples.rows, bucket)
    ts = samples.ts
    if not len(ts):
        return []
    hold_s = max(HOLD_S, 3 * float(ts[-1] - ts[0]) / len(ts))
    columns = {key: _column(samples, key) for key in _READ_EACH_TICK[source.place]}
    lead = next(iter(columns.values()))
    is_gap = np.isnan(lead) & np.isfinite(_hold(lead, ts, hold_s))
    for key in _HELD[source.place]:
        longest_s = max(hold_s, LONGER_S.get(key, 0.0))
        columns[key] = _hold(_column(samples, key), ts, longest_s)
    if source.place is MemoryDomain.DEVICE:
        # Between two readings of the driver this process moves with PyTorch's reserved memory.
        reserved = np.nan_to_num(columns["memory/reserved"])
        outside = _hold(_column(samples, "memory/process_used") - reserved, ts, hold_s)
        columns["memory/process_used"] = np.maximum(reserved + outside, 0.0)
        if source.device is not None:
            rows = reader.rows_between(
                source.device.id, "time", float(ts[0]) - hold_s, float(ts[-1]) + hold_s
            )
            device = reader.read(source.device.id, *rows, bucket)
            if len(device):
                columns |= _gpu_columns(device, ts, reserved + np.nan_to_num(outside), hold_s)
    readings = []
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        known = dict(zip(columns, map(float, values), strict=True))
        categories = None if is_gap[row] else divide(known, source.place)
        readings.append(BreakdownReading(float(ts[row]), int(samples.step[row]), categories))
    return readings


def _gpu_columns(device: SeriesBlock, ts: Floats, own: Floats, hold_s: float) -> dict[str, Floats]:
    """Return the GPU's values at the times `ts`; `own` is this process's memory on it."""
    columns = {key: _hold(_column(device, key), device.ts, hold_s) for key in _OF_THE_GPU}
    # Between two readings of the processes, others move with the used memory without `own`.
    shared = columns["gpu/mem_used"] - own[_nearest(ts, device.ts)]
    unlisted = _hold(shared - _column(device, "gpu/mem_others"), device.ts, hold_s)
    columns["gpu/mem_others"] = np.maximum(shared - unlisted, 0.0)
    at = _nearest(device.ts, ts)
    is_far = np.abs(device.ts[at] - ts) > hold_s
    return {key: np.where(is_far, np.nan, values[at]) for key, values in columns.items()}


def _nearest(ts: Floats, wanted: Floats) -> NDArray[np.intp]:
    """Return the index in `ts`, which is not empty, nearest to each wanted time."""
    after = np.minimum(np.searchsorted(ts, wanted), len(ts) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(np.abs(ts[before] - wanted) < np.abs(ts[after] - wanted), before, after)


def _column(block: SeriesBlock, key: str) -> Floats:
    """Return the means of a metric, NaN for missing and infinite values."""
    values = block.with_keys((key,)).mean[0]
    return np.where(np.isfinite(values), values, np.nan)


def _hold(values: Floats, ts: Floats, hold_s: float) -> Floats:
    """Return the values, each held until the next one or until it is older than `hold_s`."""
    known = np.where(np.isfinite(values), np.arange(len(values)), 0)
    newest = np.maximum.accumulate(known)
    return np.where(ts - ts[newest] <= hold_s, values[newest], np.nan)
