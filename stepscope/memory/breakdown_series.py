"""The memory breakdown over time: the series of a process and of its GPU on one time axis.

A moment is a row of the process's series. To it belong the GPU's row that is nearest in time, and
of what is read seldom the value before it, up to `HOLD_S` old, some `LONGER_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.memory.breakdown import TENSORS, CategoryBytes, MemoryDomain, divide
from stepscope.metrics import Stream
from stepscope.store import SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.blocks import Floats

HOLD_S = 5.0  # Maximum age of a value: most are read once a second, and a tick may be late.
LONGER_S = {"process/children_rss": 20.0} | dict.fromkeys(TENSORS, 60.0)
"""The same of what is read less often: of many workers, and of tensors between two long steps."""
ROWS_BEFORE, BUCKETS_BEFORE = 640, 4
"""Rows (64 s at 10 Hz), and buckets at least, that are read before those asked for."""
NEWEST_ROWS = 8  # Newest rows among which there is one whose readings belong together.

_AT_ONCE = {
    MemoryDomain.DEVICE: ("memory/reserved", "memory/allocated", "memory/inactive_split"),
    MemoryDomain.HOST: ("process/rss",),
}
"""Read at every tick: they count in their own row only."""
_HELD = {
    MemoryDomain.DEVICE: TENSORS,
    MemoryDomain.HOST: ("host/mem_total", "host/mem_used", "process/children_rss", *TENSORS),
}
_OF_THE_GPU = ("gpu/mem_total", "gpu/mem_used", "gpu/mem_reserved", "gpu/mem_others")


@dataclass(frozen=True, slots=True)
class BreakdownSample:
    """The parts at a time (epoch seconds) and step; `parts` is None where they are unknown."""

    ts: float
    step: int
    parts: CategoryBytes | None


@dataclass(frozen=True, slots=True)
class BreakdownSource:
    """The series that a run's ledger is made of: of its process, and of the GPU it trains on.

    Readings of the metrics `left_out` are not believed: they count as missing.
    """

    place: MemoryDomain
    samples: SeriesInfo
    device: SeriesInfo | None
    left_out: frozenset[str] = frozenset()


def ledger_source(
    series: Iterable[SeriesInfo], gpu: str | None, left_out: frozenset[str] = frozenset()
) -> BreakdownSource | None:
    """Return where the ledger comes from; None before anything was sampled.

    `gpu` is the UUID of the GPU that the run trains on, None for a run on the CPU.
    """
    found = {(info.stream, info.source): info for info in series}
    samples = found.get((Stream.SAMPLES.value, ""))
    if samples is None:
        return None
    if gpu is None:
        return BreakdownSource(MemoryDomain.HOST, samples, None, left_out)
    device = found.get((Stream.DEVICES.value, gpu))
    return BreakdownSource(MemoryDomain.DEVICE, samples, device, left_out)


def read_moments(
    reader: StoreReader, source: BreakdownSource, start: int, stop: int, bucket: int
) -> list[BreakdownSample]:
    """Return the moments of the process's rows from start to stop, in buckets of `bucket` rows.

    Raises StoreError.
    """
    start -= start % bucket
    before = max(-(-ROWS_BEFORE // bucket), BUCKETS_BEFORE) * bucket
    samples = reader.read(source.samples.id, max(0, start - before), stop, bucket)
    first = (start - max(0, start - before)) // bucket
    wanted = samples.slice(first, len(samples))
    device = _beside(reader, source.device, wanted, bucket)
    return moments(samples, device, source.place, first, source.left_out)


def newest_moment(reader: StoreReader, source: BreakdownSource) -> BreakdownSample | None:
    """Return the newest moment whose parts are known; None where the newest rows have none."""
    rows = source.samples.rows
    found = read_moments(reader, source, max(0, rows - NEWEST_ROWS), rows, 1)
    known = [moment for moment in found if moment.parts is not None]
    return known[-1] if known else None


PEAK_METRICS: Mapping[MemoryDomain, Mapping[str, tuple[str, ...]]] = {
    MemoryDomain.DEVICE: {
        "driver": ("gpu/mem_reserved",),
        "others": ("gpu/mem_others",),
        "process": ("memory/process_used",),
        "reserved": ("memory/peak_reserved", "memory/reserved"),
        "allocated": ("memory/peak_allocated", "memory/allocated"),
        **{key.removeprefix("memory/"): (key,) for key in TENSORS},
    },
    MemoryDomain.HOST: {
        "process": ("process/peak_rss", "process/rss"),
        "workers": ("process/children_rss",),
        **{key.removeprefix("memory/"): (key,) for key in TENSORS},
    },
}
"""The metrics whose highest value is the peak of a part, or of a sum of parts."""


def peaks(reader: StoreReader, source: BreakdownSource) -> CategoryBytes:
    """Return the highest value of each part over the run, in bytes; each has its own time.

    Parts that are a difference of readings have none. Raises StoreError.
    """
    highs: dict[str, float] = {}
    for info in (source.samples, source.device):
        if info is not None and info.rows:
            block = reader.read(info.id, 0, info.rows, 1 << info.rows.bit_length())
            highs |= {key: float(np.nanmax(block.high[i])) for i, key in enumerate(block.keys)}
    found = {}
    for part, metrics in PEAK_METRICS[source.place].items():
        known = [highs[key] for key in metrics if np.isfinite(highs.get(key, np.nan))]
        if known:
            found[part] = int(max(known))
    return found


def moments(
    samples: SeriesBlock,
    device: SeriesBlock | None,
    place: MemoryDomain,
    first: int = 0,
    left_out: frozenset[str] = frozenset(),
) -> list[BreakdownSample]:
    """Return the ledger at each row of `samples` from the row `first` on; those before only give
    what still counts then. `device` has the rows of the GPU around them.

    A row without a reading that rows shortly before it have is no moment of its own: lines go on
    over it. Where the reading stays away, its parts are merged with others.
    """
    hold_s = max(HOLD_S, 3 * _spacing(samples.ts))
    columns = {key: _column(samples, key) for key in _AT_ONCE[place]}
    for key in _HELD[place]:
        longest_s = max(hold_s, LONGER_S.get(key, 0.0))
        columns[key] = _hold(_column(samples, key), samples.ts, longest_s)
    columns |= {key: np.full(len(samples), np.nan) for key in left_out & columns.keys()}
    waits = _between(columns[_AT_ONCE[place][0]], samples.ts, hold_s)
    if place is MemoryDomain.DEVICE:
        reserved = columns["memory/reserved"]
        own = columns["memory/process_used"] = _process_used(samples, reserved, hold_s)
        own = np.where(np.isfinite(own), own, reserved)
        columns |= _of_the_gpu(device, samples.ts, own, hold_s)
    rows = zip(*(column[first:].tolist() for column in columns.values()), strict=True)
    found = [
        None if wait else divide(dict(zip(columns, row, strict=True)), place)
        for row, wait in zip(rows, waits[first:].tolist(), strict=True)
    ]
    places = zip(samples.ts[first:].tolist(), samples.step[first:].tolist(), found, strict=True)
    return [BreakdownSample(ts, int(step), parts) for ts, step, parts in places]


def _beside(
    reader: StoreReader, info: SeriesInfo | None, samples: SeriesBlock, bucket: int
) -> SeriesBlock | None:
    """Return the rows of a GPU's series at the times of `samples`, and a few on either side."""
    if info is None or not len(samples):
        return None
    hold_s = max(HOLD_S, 3 * _spacing(samples.ts))
    begin, end = float(samples.ts[0]) - hold_s, float(samples.ts[-1]) + hold_s
    first, last = reader.rows_between(info.id, "time", begin, end)
    return reader.read(info.id, first, last, bucket)


def _process_used(samples: SeriesBlock, reserved: Floats, hold_s: float) -> Floats:
    """Return what the driver counts for this process; between its readings, once a second, it
    moves with the allocator's, which is read ten times a second."""
    known = _column(samples, "memory/process_used")
    at = _latest(known)
    moved = reserved - reserved[at]
    held = _hold(known, samples.ts, hold_s)
    return np.maximum(np.where(np.isfinite(moved), held + moved, held), 0.0)


def _of_the_gpu(
    device: SeriesBlock | None, ts: Floats, own: Floats, hold_s: float
) -> dict[str, Floats]:
    """Return the GPU's readings at the times `ts`; `own` is what this process has of it then.

    Between the readings of other processes, once a second, they move with what is in use beyond
    this process.
    """
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
    """Return for each wanted time the place in `ts`, which is not empty, that is nearest to it."""
    after = np.minimum(np.searchsorted(ts, wanted), len(ts) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(np.abs(ts[before] - wanted) < np.abs(ts[after] - wanted), before, after)


def _column(block: SeriesBlock, key: str) -> Floats:
    """Return the means of a metric, NaN for missing and infinite values."""
    if key not in block.keys:
        return np.full(len(block), np.nan)
    values = block.mean[block.keys.index(key)]
    return np.where(np.isfinite(values), values, np.nan)


def _latest(values: Floats) -> NDArray[np.intp]:
    """Return for each place the last one up to it that has a value, 0 where none has."""
    places = np.where(np.isfinite(values), np.arange(len(values)), 0)
    return np.maximum.accumulate(places).astype(np.intp)


def _hold(values: Floats, ts: Floats, hold_s: float) -> Floats:
    """Return the values, each in force until the next one or until it is older than `hold_s`."""
    at = _latest(values)
    return np.where(ts - ts[at] <= hold_s, values[at], np.nan)


def _between(values: Floats, ts: Floats, hold_s: float) -> NDArray[np.bool_]:
    """Say of each place whether its value is missing, but was there shortly before."""
    missing: NDArray[np.bool_] = np.isnan(values) & np.isfinite(_hold(values, ts, hold_s))
    return missing


def _spacing(ts: Sequence[float] | Floats) -> float:
    """Return the mean time between two rows, 0 for fewer than two."""
    return (float(ts[-1]) - float(ts[0])) / (len(ts) - 1) if len(ts) > 1 else 0.0
