"""Live memory over the recorded actions: what was allocated when, and by which stacks.

An allocation lives from its `alloc` to the first free of the same address. What was live before the
recording began is known from what was freed without having been allocated, and from what is live at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.common.formatting import format_duration
from stepscope.memory.snapshots.stacks import NO_STACK
from stepscope.memory.snapshots.trace import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MISSING,
    SEGMENT_LESS,
    SEGMENT_MORE,
    AllocatorTrace,
    Ints,
)

COLUMNS = 1000  # Columns of a history at most: a screen has not more.
BANDS = 10  # Stacks with a band of their own; what the others hold is added up.
HELD_LIMIT = 100  # Stacks listed of the peak.
PHASE_SPANS = 200  # Spans of labels kept at most.


@dataclass(frozen=True, slots=True)
class StackBand:
    """Live bytes of one stack in each column."""

    stack: int
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackUsage:
    """Live bytes of one stack in `count` allocations."""

    stack: int
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Columns `first` to `last` in which the newest allocation had this label."""

    first: int
    last: int
    label: int


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Live bytes of one device, as the program asked for them (the allocator rounds up).

    A column stands for a stretch of actions and shows the moment in it with the most live bytes, so
    that no peak is lost: there `live` = `before` + all bands + `rest`.
    """

    device: int
    actions: int
    columns: tuple[int, ...]  # The action that each column shows, counted from 0.
    seconds: tuple[float, ...] | None
    """Time of each column since the first action; None where torch did not record it."""
    live: tuple[int, ...]
    before: tuple[int, ...]  # Live since before the recording.
    bands: tuple[StackBand, ...]  # The stacks that hold most at the peak, the largest first.
    rest: tuple[int, ...]
    reserved: tuple[int, ...] | None
    """Bytes of all segments; None where the file does not list them."""
    peak: int
    peak_column: int
    end: int  # Live after the last action.
    spans: tuple[LabelSpan, ...]
    ooms: tuple[int, ...]  # Columns in which an allocation failed.
    at_peak: tuple[StackUsage, ...]
    """The stacks that hold most at the peak, of those allocated since the recording began."""


@dataclass(frozen=True, slots=True)
class _Lives:
    """Allocations of a trace: the rows of their begin and end (its length: never), bytes, stack."""

    begin: Ints
    end: Ints
    size: Ints
    stack: NDArray[np.int32]
    before: Ints  # Change of what was live before, by row.
    before_at_start: int


def history(
    device: int, trace: AllocatorTrace, live_blocks: Mapping[int, int], reserved_end: int | None
) -> MemoryTimeline | None:
    """Return the history of a device; None for one without actions.

    `live_blocks` has the bytes asked for by address of what is live at the end, `reserved_end` the
    bytes of all segments then.
    """
    if not len(trace):
        return None
    lives = _lives(trace, live_blocks)
    change = lives.before.copy()
    change[lives.begin] += lives.size  # no row begins or ends two of them
    ended = lives.end < len(trace)
    change[lives.end[ended]] -= lives.size[ended]
    live = lives.before_at_start + np.cumsum(change)
    columns = _columns(live)
    before = (lives.before_at_start + np.cumsum(lives.before))[columns]
    peak_row = int(columns[int(np.argmax(live[columns]))])
    held = _held(lives, peak_row)
    bands = [_live_bytes(lives, one.stack, columns) for one in held[:BANDS]]
    rest = live[columns] - before - sum(bands)
    shown = zip(held, bands, strict=False)
    ooms = np.searchsorted(columns, [oom.row for oom in trace.ooms])
    return MemoryTimeline(
        device=device,
        actions=len(trace),
        columns=tuple(columns.tolist()),
        seconds=_seconds(trace.time_us, columns),
        live=tuple(live[columns].tolist()),
        before=tuple(before.tolist()),
        bands=tuple(StackBand(one.stack, tuple(band.tolist())) for one, band in shown),
        rest=tuple(rest.tolist()),
        reserved=None if reserved_end is None else _reserved(trace, reserved_end, columns),
        peak=int(live[peak_row]),
        peak_column=int(np.searchsorted(columns, peak_row)),
        end=int(live[-1]),
        spans=_spans(trace, columns),
        ooms=tuple(np.unique(np.minimum(ooms, len(columns) - 1)).tolist()),
        at_peak=tuple(held),
    )


def lasting(seconds: float) -> str:
    """Return how long a history is; most are shorter than a second.

    >>> lasting(0.0421), lasting(125)
    ('42 ms', '2 min 05 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_duration(seconds)


def _held(lives: _Lives, row: int) -> list[StackUsage]:
    """Return the stacks that hold most after a row."""
    alive = (lives.begin <= row) & (lives.end > row) & (lives.stack != NO_STACK)
    sizes = np.bincount(lives.stack[alive], weights=lives.size[alive])
    counts = np.bincount(lives.stack[alive])
    largest = np.argsort(-sizes, kind="stable")[:HELD_LIMIT].tolist()
    return [StackUsage(one, int(sizes[one]), int(counts[one])) for one in largest if counts[one]]


def _lives(trace: AllocatorTrace, live_blocks: Mapping[int, int]) -> _Lives:
    """Pair each allocation with the first free of its address."""
    action = trace.action
    allocates = action == ALLOC
    frees = (action == FREE_REQUESTED) | (action == FREE_COMPLETED)
    known = (trace.address != MISSING) & (trace.size != MISSING)
    rows = np.flatnonzero((allocates | frees) & known)
    rows = rows[np.argsort(trace.address[rows], kind="stable")]  # by address, then by time
    address, allocated = trace.address[rows], allocates[rows]
    first = np.append(True, address[1:] != address[:-1])[: len(rows)]
    is_last = np.append(first[1:], True)[: len(rows)]
    # Whatever follows at the same address ends it: where a free is missing, another allocation.
    end = np.where(is_last, len(trace), np.append(rows[1:], len(trace))[: len(rows)])
    begin = rows[allocated]
    # Freed without having been allocated here, and live at the end without it.
    unknown = rows[first & ~allocated]
    before = np.zeros(len(trace), np.int64)
    before[unknown] = -trace.size[unknown]
    places = np.fromiter(live_blocks.keys(), np.int64, len(live_blocks))
    sizes = np.fromiter(live_blocks.values(), np.int64, len(live_blocks))
    at_start = int(trace.size[unknown].sum()) + int(sizes[~np.isin(places, address)].sum())
    return _Lives(begin, end[allocated], trace.size[begin], trace.stack[begin], before, at_start)


def _columns(live: Ints) -> Ints:
    """Return the row with the most live bytes in each of at most COLUMNS equal stretches."""
    stretches = np.array_split(live, min(COLUMNS, len(live)))
    starts = np.cumsum([0] + [len(stretch) for stretch in stretches[:-1]])
    columns: Ints = starts + [int(np.argmax(stretch)) for stretch in stretches]
    return columns


def _live_bytes(lives: _Lives, stack: int, columns: Ints) -> Ints:
    """Return the bytes of a stack's allocations that are live after each of the rows `columns`."""
    mine = lives.stack == stack
    size = lives.size[mine]
    return _cumulative(lives.begin[mine], size, columns) - _cumulative(
        lives.end[mine], size, columns
    )


def _cumulative(rows: Ints, size: Ints, columns: Ints) -> Ints:
    """Return the sum of the sizes of all `rows` up to each column."""
    order = np.argsort(rows, kind="stable")
    sums = np.concatenate([[0], np.cumsum(size[order])])
    return np.asarray(sums[np.searchsorted(rows[order], columns, "right")])


def _reserved(trace: AllocatorTrace, reserved_end: int, columns: Ints) -> tuple[int, ...]:
    """Return the bytes of all segments, reckoned back from the end."""
    size = np.where(trace.size == MISSING, 0, trace.size)
    change = size * (
        (trace.action == SEGMENT_MORE).astype(np.int64) - (trace.action == SEGMENT_LESS)
    )
    total = np.cumsum(change)
    return tuple(np.maximum(0, reserved_end - (total[-1] - total[columns])).tolist())


def _seconds(time_us: Ints, columns: Ints) -> tuple[float, ...] | None:
    """Return the columns' times since the first action; None where one is missing."""
    if (time_us[columns] == MISSING).any() or time_us[0] == MISSING:
        return None
    times = np.maximum.accumulate(np.maximum(0, time_us[columns] - time_us[0]))
    return tuple((times / 1e6).round(6).tolist())


def _spans(trace: AllocatorTrace, columns: Ints) -> tuple[LabelSpan, ...]:
    """Return the stretches of columns with one label, without those that have none."""
    labeled = np.where(trace.action == ALLOC, np.arange(len(trace)), 0)
    newest = trace.phase[np.maximum.accumulate(labeled)[columns]]
    edges = np.flatnonzero(np.diff(newest)) + 1
    begins, ends = [0, *edges.tolist()], [*edges.tolist(), len(columns)]
    spans = [
        LabelSpan(first, end - 1, int(newest[first]))
        for first, end in zip(begins, ends, strict=True)
        if newest[first] != MISSING
    ]
    return tuple(spans[:PHASE_SPANS])
