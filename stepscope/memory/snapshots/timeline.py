"""The allocator trace of a snapshot as columns, and live memory over its actions; pure, no I/O.

A trace has one row per action. An allocation lives from its `alloc` to the first free of the same
address. Memory that was live before the recording is found by frees without an allocation, and by
live blocks at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.common.formatting import format_duration
from stepscope.memory.snapshots.segments import MAX_SIZE, whole
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable

Ints = NDArray[np.int64]

ALLOC, FREE_REQUESTED, FREE_COMPLETED = 0, 1, 2
SEGMENT_MORE, SEGMENT_LESS, OOM, OTHER = 3, 4, 5, 6
ACTIONS = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "free": FREE_COMPLETED,
    "segment_alloc": SEGMENT_MORE,
    "segment_map": SEGMENT_MORE,
    "segment_free": SEGMENT_LESS,
    "segment_unmap": SEGMENT_LESS,
    "oom": OOM,
}
"""Codes by torch's names; all other names are OTHER."""
MISSING = -1  # In a column: no value, or an invalid one.
MAX_LABELS = 200  # Maximum number of distinct labels; later ones are dropped.
MAX_OOMS = 50


@dataclass(frozen=True, slots=True)
class OomAction:
    """An allocation that failed: bytes requested, and free on the device (None: not recorded)."""

    row: int
    requested: int
    device_free: int | None


@dataclass(frozen=True, slots=True)
class AllocatorTrace:
    """The actions of one device's allocator, by time; all columns have the same length."""

    action: NDArray[np.int8]
    address: Ints
    size: Ints  # Requested bytes; for segments their size.
    time_us: Ints  # Unix time; MISSING if torch did not record it.
    stack: NDArray[np.int32]  # Stack number of allocations; NO_STACK for all other actions.
    phase: NDArray[np.int16]  # Label number of allocations, MISSING without a label.
    ooms: tuple[OomAction, ...] = ()

    def __len__(self) -> int:
        return len(self.action)


def read_trace(entries: list[Any], stacks: StackTable, labels: dict[str, int]) -> AllocatorTrace:
    """Return the trace of one device from torch's entries; adds new labels to `labels`."""
    known = [one for one in entries if type(one) is dict and isinstance(one.get("action"), str)]
    codes = (ACTIONS.get(entry["action"], OTHER) for entry in known)
    action = np.fromiter(codes, np.int8, len(known))
    stack = np.full(len(known), NO_STACK, np.int32)
    phase = np.full(len(known), MISSING, np.int16)
    for row in np.flatnonzero(action == ALLOC).tolist():
        stack[row] = stacks.number(known[row].get("frames"))
        phase[row] = _label_number(known[row].get("user_metadata"), labels)
    ooms = [
        OomAction(row, whole(known[row].get("size")) or 0, whole(known[row].get("device_free")))
        for row in np.flatnonzero(action == OOM)[:MAX_OOMS].tolist()
    ]
    address, size, time_us = (_column(known, key) for key in ("addr", "size", "time_us"))
    return AllocatorTrace(action, address, size, time_us, stack, phase, tuple(ooms))


def _label_number(label: object, labels: dict[str, int]) -> int:
    if not isinstance(label, str) or not label:
        return MISSING
    if label not in labels and len(labels) >= MAX_LABELS:
        return MISSING
    return labels.setdefault(label, len(labels))


def _column(entries: list[dict[str, Any]], key: str) -> Ints:
    try:
        column = np.fromiter(map(itemgetter(key), entries), np.int64, len(entries))
    except (KeyError, TypeError, ValueError, OverflowError):
        values = (whole(entry.get(key)) for entry in entries)
        numbers = (MISSING if value is None else value for value in values)
        column = np.fromiter(numbers, np.int64, len(entries))
    column[(column < 0) | (column >= MAX_SIZE)] = MISSING
    return column


COLUMNS = 1000  # Maximum number of columns of a timeline: a screen has not more.
BANDS = 10  # Maximum number of stacks with a band; the memory of all others is added up.
MAX_HELD = 100  # Maximum number of stacks listed at the peak.
MAX_SPANS = 200  # Maximum number of spans of labels.


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
    """Live requested bytes of one device (the allocator rounds up).

    A column is the action with the most live bytes of a stretch, where `live` = `before` + all
    bands + `rest`: no peak is lost.
    """

    device: int
    actions: int
    columns: tuple[int, ...]  # The index of the action of each column.
    seconds: tuple[float, ...] | None  # Of each column since the first action; None if unknown.
    live: tuple[int, ...]
    before: tuple[int, ...]  # Live since before the recording.
    bands: tuple[StackBand, ...]  # The largest stacks at the peak, the largest first.
    rest: tuple[int, ...]
    reserved: tuple[int, ...] | None  # Bytes of all segments; None if the file does not list them.
    peak: int
    peak_column: int
    end: int  # Live after the last action.
    spans: tuple[LabelSpan, ...]
    ooms: tuple[int, ...]  # Columns with a failed allocation.
    at_peak: tuple[StackUsage, ...]  # Largest stacks of those allocated since the recording began.


@dataclass(frozen=True, slots=True)
class _Lifetimes:
    """Allocations of a trace: rows of their begin and end (its length: never), bytes, stack."""

    begin: Ints
    end: Ints
    size: Ints
    stack: NDArray[np.int32]
    before: Ints  # Change of the bytes from before the recording, by row.
    before_at_start: int


def history(
    device: int, trace: AllocatorTrace, live_blocks: Mapping[int, int], reserved_end: int | None
) -> MemoryTimeline | None:
    """Return the timeline of a device; None for a device without actions.

    `live_blocks` has the requested bytes by address of the live blocks at the end, `reserved_end`
    the bytes of all segments then.
    """
    if not len(trace):
        return None
    lives = _lifetimes(trace, live_blocks)
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
        rest=tuple((live[columns] - before - sum(bands)).tolist()),
        reserved=None if reserved_end is None else _reserved(trace, reserved_end, columns),
        peak=int(live[peak_row]),
        peak_column=int(np.searchsorted(columns, peak_row)),
        end=int(live[-1]),
        spans=_spans(trace, columns),
        ooms=tuple(np.unique(np.minimum(ooms, len(columns) - 1)).tolist()),
        at_peak=tuple(held),
    )


def lasting(seconds: float) -> str:
    """Return the duration of a timeline as text; most are shorter than a second.

    >>> lasting(0.0421), lasting(125)
    ('42 ms', '2 min 05 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_duration(seconds)


def _held(lives: _Lifetimes, row: int) -> list[StackUsage]:
    alive = (lives.begin <= row) & (lives.end > row) & (lives.stack != NO_STACK)
    sizes = np.bincount(lives.stack[alive], weights=lives.size[alive])
    counts = np.bincount(lives.stack[alive])
    largest = np.argsort(-sizes, kind="stable")[:MAX_HELD].tolist()
    return [StackUsage(one, int(sizes[one]), int(counts[one])) for one in largest if counts[one]]


def _lifetimes(trace: AllocatorTrace, live_blocks: Mapping[int, int]) -> _Lifetimes:
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
    # The next action at the same address ends it: if a free is missing, another allocation.
    end = np.where(is_last, len(trace), np.append(rows[1:], len(trace))[: len(rows)])
    begin = rows[allocated]
    # Freed or live at the end without an allocation in this trace.
    unknown = rows[first & ~allocated]
    before = np.zeros(len(trace), np.int64)
    before[unknown] = -trace.size[unknown]
    places = np.fromiter(live_blocks.keys(), np.int64, len(live_blocks))
    sizes = np.fromiter(live_blocks.values(), np.int64, len(live_blocks))
    at_start = int(trace.size[unknown].sum()) + int(sizes[~np.isin(places, address)].sum())
    return _Lifetimes(
        begin, end[allocated], trace.size[begin], trace.stack[begin], before, at_start
    )


def _columns(live: Ints) -> Ints:
    """Return the row with the most live bytes in each of at most COLUMNS equal stretches."""
    stretches = np.array_split(np.arange(len(live)), min(COLUMNS, len(live)))
    return np.array([rows[np.argmax(live[rows])] for rows in stretches])


def _live_bytes(lives: _Lifetimes, stack: int, columns: Ints) -> Ints:
    """Return the bytes of a stack's allocations that are live after each of the rows `columns`."""
    mine = lives.stack == stack
    begin, end, size = lives.begin[mine], lives.end[mine], lives.size[mine]
    return _cumulative(begin, size, columns) - _cumulative(end, size, columns)


def _cumulative(rows: Ints, size: Ints, columns: Ints) -> Ints:
    """Return the sum of the sizes of all `rows` up to each column."""
    order = np.argsort(rows, kind="stable")
    sums = np.concatenate([[0], np.cumsum(size[order])])
    return np.asarray(sums[np.searchsorted(rows[order], columns, "right")])


def _reserved(trace: AllocatorTrace, reserved_end: int, columns: Ints) -> tuple[int, ...]:
    """Return the bytes of all segments, calculated backwards from the end."""
    more, less = trace.action == SEGMENT_MORE, trace.action == SEGMENT_LESS
    total = np.cumsum(np.where(trace.size == MISSING, 0, trace.size) * (more * 1 - less * 1))
    return tuple(np.maximum(0, reserved_end - (total[-1] - total[columns])).tolist())


def _seconds(time_us: Ints, columns: Ints) -> tuple[float, ...] | None:
    """Return the columns' times since the first action; None if one is missing."""
    if (time_us[columns] == MISSING).any() or time_us[0] == MISSING:
        return None
    times = np.maximum.accumulate(np.maximum(0, time_us[columns] - time_us[0]))
    return tuple((times / 1e6).round(6).tolist())


def _spans(trace: AllocatorTrace, columns: Ints) -> tuple[LabelSpan, ...]:
    """Return the stretches of columns with one label; columns without a label have none."""
    labeled = np.where(trace.action == ALLOC, np.arange(len(trace)), 0)
    newest = trace.phase[np.maximum.accumulate(labeled)[columns]]
    begins = [0, *(np.flatnonzero(np.diff(newest)) + 1).tolist()]
    spans = [
        LabelSpan(first, end - 1, int(newest[first]))
        for first, end in zip(begins, [*begins[1:], len(columns)], strict=True)
        if newest[first] != MISSING
    ]
    return tuple(spans[:MAX_SPANS])
