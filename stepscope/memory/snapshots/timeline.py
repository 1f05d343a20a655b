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

COLUMNS = 1000
"""Columns of a history at most: a screen has not more."""
BANDS = 10
"""Stacks with a band of their own; what the others hold is added up."""
HELD_LIMIT = 100
"""Stacks listed of the peak."""
PHASE_SPANS = 200
"""Spans of labels kept at most."""


@dataclass(frozen=True, slots=True)
class StackBand:
    """Live bytes of one stack in each column."""

    stack: int
    peak: int
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
    columns: tuple[int, ...]
    """The action that each column shows, counted from 0."""
    seconds: tuple[float, ...] | None
    """Time of each column since the first action; None where torch did not record it."""
    live: tuple[int, ...]
    before: tuple[int, ...]
    """Live since before the recording."""
    bands: tuple[StackBand, ...]
    """The stacks that hold most at the peak, the largest first."""
    rest: tuple[int, ...]
    reserved: tuple[int, ...] | None
    """Bytes of all segments; None where the file does not list them."""
    peak: int
    peak_column: int
    end: int
    """Live after the last action."""
    spans: tuple[LabelSpan, ...]
    ooms: tuple[int, ...]
    """Columns in which an allocation failed."""
    at_peak: tuple[StackUsage, ...]
    """The stacks that hold most at the peak, of those allocated since the recording began."""


@dataclass(frozen=True, slots=True)
class _Lives:
    """Allocations of a trace: the rows of their begin and end (its length: never), bytes, stack."""

    begin: Ints
    end: Ints
    size: Ints
    stack: NDArray[np.int32]
    before: Ints
    """Change of what was live before, by row."""
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
    bands = _bands(lives, held[:BANDS], columns)
    rest = live[columns] - before - sum(band for _, band in bands)
    return MemoryTimeline(
        device=device,
        actions=len(trace),
        columns=_whole(columns),
        seconds=_seconds(trace.time_us, columns),
        live=_whole(live[columns]),
        before=_whole(before),
        bands=tuple(StackBand(stack, int(band.max()), _whole(band)) for stack, band in bands),
        rest=_whole(rest),
        reserved=None if reserved_end is None else _reserved(trace, reserved_end, columns),
        peak=int(live[peak_row]),
        peak_column=int(np.searchsorted(columns, peak_row)),
        end=int(live[-1]),
        spans=_spans(trace, columns),
        ooms=tuple(sorted({_column(columns, oom.row) for oom in trace.ooms})),
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
    return [
        StackUsage(stack, int(sizes[stack]), int(counts[stack]))
        for stack in largest
        if counts[stack]
    ]


def _lives(trace: AllocatorTrace, live_blocks: Mapping[int, int]) -> _Lives:
    """Pair each allocation with the first free of its address."""
    action = trace.action
    allocates = action == ALLOC
    frees = (action == FREE_REQUESTED) | (action == FREE_COMPLETED)
    known = (trace.address != MISSING) & (trace.size != MISSING)
    rows = np.flatnonzero((allocates | frees) & known)
    rows = rows[np.argsort(trace.address[rows], kind="stable")]  # by address, then by time
    address, allocated = trace.address[rows], allocates[rows]
    first = np.ones(len(rows), bool)
    first[1:] = address[1:] != address[:-1]
    has_next = np.ones(len(rows), bool)
    has_next[:-1] = ~first[1:]
    has_next[-1:] = False
    # Whatever follows at the same address ends it: where a free is missing, another allocation.
    following = np.append(rows[1:], len(trace))
    end = np.where(has_next, following, len(trace))
    begin = rows[allocated]
    # Freed without having been allocated here, and live at the end without it.
    unknown = rows[first & ~allocated]
    before = np.zeros(len(trace), np.int64)
    before[unknown] = -trace.size[unknown]
    kept = _untouched(address[first], live_blocks)
    return _Lives(
        begin,
        end[allocated],
        trace.size[begin],
        trace.stack[begin],
        before,
        int(trace.size[unknown].sum()) + kept,
    )


def _untouched(touched: Ints, live_blocks: Mapping[int, int]) -> int:
    """Return the bytes of the live blocks whose address no action names; `touched` is sorted."""
    places = np.fromiter(live_blocks.keys(), np.int64, len(live_blocks))
    sizes = np.fromiter(live_blocks.values(), np.int64, len(live_blocks))
    return int(sizes[~np.isin(places, touched)].sum())


def _columns(live: Ints) -> Ints:
    """Return the row with the most live bytes in each of at most COLUMNS equal stretches."""
    stretches = min(COLUMNS, len(live))
    edges = np.linspace(0, len(live), stretches + 1).astype(np.int64)
    return np.array(
        [
            begin + int(np.argmax(live[begin:end]))
            for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ],
        np.int64,
    )


def _bands(lives: _Lives, held: list[StackUsage], columns: Ints) -> list[tuple[int, Ints]]:
    """Return these stacks with their live bytes in each column."""
    bands = []
    for stack in [one.stack for one in held]:
        mine = lives.stack == stack
        live = _live_in(lives.begin[mine], lives.end[mine], lives.size[mine], columns)
        bands.append((stack, live))
    return bands


def _live_in(begin: Ints, end: Ints, size: Ints, columns: Ints) -> Ints:
    """Return the bytes of some allocations that are live after each of the rows `columns`."""
    return _added(begin, size, columns) - _added(end, size, columns)


def _added(rows: Ints, size: Ints, columns: Ints) -> Ints:
    """Return the sizes of all `rows` up to each column, added up."""
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
    return _whole(np.maximum(0, reserved_end - (total[-1] - total[columns])))


def _seconds(time_us: Ints, columns: Ints) -> tuple[float, ...] | None:
    """Return the columns' times since the first action; None where one is missing."""
    if (time_us[columns] == MISSING).any() or time_us[0] == MISSING:
        return None
    times = np.maximum.accumulate(np.maximum(0, time_us[columns] - time_us[0]))
    return tuple((times / 1e6).round(6).tolist())


def _spans(trace: AllocatorTrace, columns: Ints) -> tuple[LabelSpan, ...]:
    """Return the stretches of columns with one label, without those that have none."""
    if not (trace.phase != MISSING).any():
        return ()
    labeled = np.where(trace.action == ALLOC, np.arange(len(trace)), 0)
    newest = trace.phase[np.maximum.accumulate(labeled)[columns]]
    edges = np.flatnonzero(np.diff(newest)) + 1
    begins = [0, *edges.tolist()]
    ends = [*(edges - 1).tolist(), len(columns) - 1]
    spans = [
        LabelSpan(first, last, int(newest[first]))
        for first, last in zip(begins, ends, strict=True)
        if newest[first] != MISSING
    ]
    return tuple(spans[:PHASE_SPANS])


def _column(columns: Ints, row: int) -> int:
    return min(int(np.searchsorted(columns, row)), len(columns) - 1)


def _whole(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(value) for value in values.tolist())
