"""The memory breakdown over time: the series of a process and of its GPU on one time axis.

A moment is a row of the process's series, with the GPU's row nearest in time. Values that are read
less often are held from the last sample, up to `HOLD_S`, some up to `LONGER_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.common.metrics import Stream
from stepscope.memory.breakdown import TENSORS, CategoryBytes, MemoryDomain, divide
from stepscope.store import SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.blocks import Floats
from stepscope.store.final_values import highest

HOLD_S = 5.0  # Maximum age of a value: most are read once a second, and a tick may be late.
LONGER_S = {"process/children_rss": 20.0} | dict.fromkeys(TENSORS, 60.0)
"""Maximum age of values that are read less often: many workers, tensors between long steps."""
ROWS_BEFORE, BUCKETS_BEFORE = 640, 4  # Minimums read before the requested rows (64 s at 10 Hz).
NEWEST_ROWS = 8  # Newest rows of which at least one has consistent values.

_AT_ONCE = {
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
class BreakdownSample:
    """The breakdown at a time (epoch seconds) and step; `parts` is None if it is unknown."""

    ts: float
    step: int
    parts: CategoryBytes | None


@dataclass(frozen=True, slots=True)
class BreakdownSource:
    """The series of a process and its GPU; the metrics `left_out` are unreliable, so missing."""

    place: MemoryDomain
    samples: SeriesInfo
    device: SeriesInfo | None
    left_out: frozenset[str] = frozenset()


def ledger_source(
    series: Iterable[SeriesInfo], gpu: str | None, left_out: frozenset[str] = frozenset()
) -> BreakdownSource | None:
    """Return the source of the breakdown, None before any sample; `gpu` is None for the CPU."""
    by_source = {(info.stream, info.source): info for info in series}
    samples = by_source.get((Stream.SAMPLES.value, ""))
    if samples is None:
        return None
    place = MemoryDomain.HOST if gpu is None else MemoryDomain.DEVICE
    device = by_source.get((Stream.DEVICES.value, gpu or ""))
    return BreakdownSource(place, samples, None if gpu is None else device, left_out)


def read_moments(
    reader: StoreReader, source: BreakdownSource, start: int, stop: int, bucket: int
) -> list[BreakdownSample]:
    """Return the moments of these rows, in buckets of `bucket` rows. Raises StoreError."""
    start -= start % bucket
    before = max(0, start - max(-(-ROWS_BEFORE // bucket), BUCKETS_BEFORE) * bucket)
    samples = reader.read(source.samples.id, before, stop, bucket)
    first, device = (start - before) // bucket, None
    ts = samples.ts[first:]
    if source.device is not None and len(ts):
        hold_s = max(HOLD_S, 3 * _interval(ts))
        begin, end = float(ts[0]) - hold_s, float(ts[-1]) + hold_s
        device_rows = reader.rows_between(source.device.id, "time", begin, end)
        device = reader.read(source.device.id, *device_rows, bucket)
    return _moments(samples, device, source, first)


def newest_moment(reader: StoreReader, source: BreakdownSource) -> BreakdownSample | None:
    """Return the newest known moment; None if the newest rows have none."""
    rows = source.samples.rows
    moments = read_moments(reader, source, max(0, rows - NEWEST_ROWS), rows, 1)
    return next((one for one in reversed(moments) if one.parts is not None), None)


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
    highs = highest(reader, source.samples) | highest(reader, source.device)
    if highs.get("memory/gradients") == 0:  # No reading found any: zero_grad() freed them before.
        del highs["memory/gradients"]
    return {
        part: int(max(highs[key] for key in metrics if key in highs))
        for part, metrics in PEAK_METRICS[source.place].items()
        if highs.keys() & set(metrics)
    }


def _moments(
    samples: SeriesBlock, device: SeriesBlock | None, source: BreakdownSource, first: int
) -> list[BreakdownSample]:
    """Return the breakdown at each row of `samples` from the row `first` on.

    Earlier rows, and those of the GPU around them, only give values that are held. A row without a
    value that recent rows have is no moment: lines continue over it. If the value stays missing,
    its categories are merged with others.
    """
    place = source.place
    hold_s = max(HOLD_S, 3 * _interval(samples.ts))
    columns = {key: _column(samples, key) for key in _AT_ONCE[place]}
    for key in _HELD[place]:
        longest_s = max(hold_s, LONGER_S.get(key, 0.0))
        columns[key] = _hold(_column(samples, key), samples.ts, longest_s)
    columns |= {key: np.full(len(samples), np.nan) for key in source.left_out & columns.keys()}
    lead = columns[_AT_ONCE[place][0]]
    is_gap = np.isnan(lead) & np.isfinite(_hold(lead, samples.ts, hold_s))
    if place is MemoryDomain.DEVICE:
        reserved = columns["memory/reserved"]
        own = columns["memory/process_used"] = _process_used(samples, reserved, hold_s)
        own = np.where(np.isfinite(own), own, reserved)
        columns |= _of_the_gpu(device, samples.ts, own, hold_s)
    rows = zip(*(column[first:].tolist() for column in columns.values()), strict=True)
    parts = (
        None if gap else divide(dict(zip(columns, row, strict=True)), place)
        for row, gap in zip(rows, is_gap[first:].tolist(), strict=True)
    )
    times = samples.ts[first:].tolist(), samples.step[first:].tolist()
    return [
        BreakdownSample(ts, int(step), one) for ts, step, one in zip(*times, parts, strict=True)
    ]


def _process_used(samples: SeriesBlock, reserved: Floats, hold_s: float) -> Floats:
    """Return the driver's value for this process; between samples it follows `reserved`."""
    known = _column(samples, "memory/process_used")
    moved = reserved - reserved[_latest(known)]
    held = _hold(known, samples.ts, hold_s)
    return np.maximum(np.where(np.isfinite(moved), held + moved, held), 0.0)


def _of_the_gpu(
    device: SeriesBlock | None, ts: Floats, own: Floats, hold_s: float
) -> dict[str, Floats]:
    """Return the GPU's values at the times `ts`; `own` is this process's memory on it."""
    # Between samples of other processes (once a second) they follow the used memory without `own`.
    if device is None or not len(device):
        return {key: np.full(len(ts), np.nan) for key in _OF_THE_GPU}
    at = _nearest(device.ts, ts)
    far = np.abs(device.ts[at] - ts) > hold_s
    raw = {key: _column(device, key) for key in _OF_THE_GPU}
    held = {key: _hold(values, device.ts, hold_s)[at] for key, values in raw.items()}
    read = _latest(raw["gpu/mem_others"])[at]
    used = raw["gpu/mem_used"]
    moved = held["gpu/mem_used"] - used[read] - (own - own[_nearest(ts, device.ts[read])])
    others = held["gpu/mem_others"]
    held["gpu/mem_others"] = np.maximum(others + np.where(np.isfinite(moved), moved, 0.0), 0.0)
    return {key: np.where(far, np.nan, values) for key, values in held.items()}


def _nearest(ts: Floats, wanted: Floats) -> NDArray[np.intp]:
    """Return the index in `ts`, which is not empty, nearest to each wanted time."""
    after = np.minimum(np.searchsorted(ts, wanted), len(ts) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(np.abs(ts[before] - wanted) < np.abs(ts[after] - wanted), before, after)


def _column(block: SeriesBlock, key: str) -> Floats:
    """Return the means of a metric, NaN for missing and infinite values."""
    values = block.with_keys((key,)).mean[0]
    return np.where(np.isfinite(values), values, np.nan)


def _latest(values: Floats) -> NDArray[np.intp]:
    """Return for each index the last one up to it with a value, 0 without one."""
    indices = np.where(np.isfinite(values), np.arange(len(values)), 0)
    return np.maximum.accumulate(indices).astype(np.intp)


def _hold(values: Floats, ts: Floats, hold_s: float) -> Floats:
    """Return the values, each held until the next one or until it is older than `hold_s`."""
    at = _latest(values)
    return np.where(ts - ts[at] <= hold_s, values[at], np.nan)


def _interval(ts: Sequence[float] | Floats) -> float:
    """Return the mean time between two rows, 0 for fewer than two."""
    return (float(ts[-1]) - float(ts[0])) / (len(ts) - 1) if len(ts) > 1 else 0.0
