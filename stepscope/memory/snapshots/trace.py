"""The allocator trace in a snapshot as columns, one row per action; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Return the trace of one device from torch's list of entries.

    `labels` has the numbers of the program's allocation labels (`_set_memory_metadata`); new ones
    are added.
    """
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
