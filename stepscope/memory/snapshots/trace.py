"""The history in a snapshot, as columns: what the allocator did, one row an action."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.common.formatting import printable
from stepscope.memory.snapshots.segments import LARGEST_SIZE
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable

Ints = NDArray[np.int64]
Small = NDArray[np.int8]

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
    "snapshot": OTHER,
}
MISSING = -1
"""In a column: not told, or not a number that can be."""
BATCH = 20_000
"""Actions that become rows together."""
PHASES_LIMIT = 200
"""Distinct labels kept; those after them are taken as none."""
LABEL_LIMIT = 60
OOMS_LIMIT = 50


@dataclass(frozen=True, slots=True)
class OomAction:
    """An allocation that failed: bytes asked for, and free on the device (None: not told)."""

    row: int
    requested: int
    device_free: int | None


@dataclass(frozen=True, slots=True)
class AllocatorTrace:
    """What one device's allocator did, in the order of time; all columns have the same length."""

    action: Small
    address: Ints
    size: Ints
    """Bytes as the program asked for them; of segments their size."""
    time_us: Ints
    """Of the clock; MISSING where torch did not record it."""
    stack: NDArray[np.int32]
    """Of allocations; NO_STACK of all else."""
    phase: NDArray[np.int16]
    """Of allocations: a place in `LabelTable.names`, MISSING without a label."""
    ooms: tuple[OomAction, ...] = ()
    unreadable: int = 0
    """Entries that were no actions."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(slots=True)
class LabelTable:
    """The labels that a program gave to its allocations (`_set_memory_metadata`)."""

    names: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def place(self, label: object) -> int:
        """Return the place of a label in `names`; MISSING for an empty one."""
        if not isinstance(label, str) or not label:
            return MISSING
        found = self._places.get(label)
        if found is None:
            found = MISSING
            if len(self.names) < PHASES_LIMIT:
                found = len(self.names)
                self.names.append(printable(label[:LABEL_LIMIT]))
                self._places[label] = found
        return found


def read_trace(entries: list[Any], stacks: StackTable, labels: LabelTable) -> AllocatorTrace:
    """Return one device's history, of entries as torch lists them."""
    rows = _TraceRows(stacks, labels)
    rows.add(entries)
    return rows.finish()


class _TraceRows:
    """Makes the columns of one device, batch after batch."""

    def __init__(self, stacks: StackTable, labels: LabelTable) -> None:
        self._stacks = stacks
        self._labels = labels
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._ooms: list[OomAction] = []
        self._rows = 0
        self._unreadable = 0

    def add(self, entries: list[Any]) -> None:
        """Take over entries."""
        for begin in range(0, len(entries), BATCH):
            batch = entries[begin : begin + BATCH]
            if set(map(type, batch)) != {dict}:
                batch = [entry for entry in batch if type(entry) is dict]
                self._unreadable += min(BATCH, len(entries) - begin) - len(batch)
            if batch:
                self._add(batch)

    def finish(self) -> AllocatorTrace:
        """Return the columns."""
        kinds = (np.int8, np.int64, np.int64, np.int64, np.int32, np.int16)
        empty: list[tuple[NDArray[Any], ...]] = [tuple(np.zeros(0, kind) for kind in kinds)]
        parts = zip(*(self._parts or empty), strict=True)
        action, address, size, time_us, stack, phase = (np.concatenate(part) for part in parts)
        self._parts.clear()
        return AllocatorTrace(
            action, address, size, time_us, stack, phase, tuple(self._ooms), self._unreadable
        )

    def _add(self, batch: list[dict[str, Any]]) -> None:
        action = _actions(batch)
        if (action == MISSING).any():
            known = [entry for entry, code in zip(batch, action, strict=True) if code != MISSING]
            self._unreadable += len(batch) - len(known)
            action = action[action != MISSING]
            batch = known
            if not batch:
                return
        allocates = action == ALLOC
        allocated = list(compress(batch, allocates.tolist()))
        stack = np.full(len(batch), NO_STACK, np.int32)
        stack[allocates] = [self._stacks.number(entry.get("frames")) for entry in allocated]
        phase = np.full(len(batch), MISSING, np.int16)
        phase[allocates] = self._phases(allocated)
        for row in np.flatnonzero(action == OOM).tolist():
            self._add_oom(self._rows + row, batch[row])
        self._parts.append(
            (
                action,
                _column(batch, "addr"),
                _column(batch, "size"),
                _column(batch, "time_us"),
                stack,
                phase,
            )
        )
        self._rows += len(batch)

    def _phases(self, allocated: list[dict[str, Any]]) -> list[int]:
        labels = [entry.get("user_metadata") for entry in allocated]
        return [self._labels.place(label) for label in labels]

    def _add_oom(self, row: int, entry: dict[str, Any]) -> None:
        requested, free = entry.get("size"), entry.get("device_free")
        if len(self._ooms) < OOMS_LIMIT:
            told = type(free) is int and 0 <= free < LARGEST_SIZE
            self._ooms.append(OomAction(row, max(0, _whole(requested)), free if told else None))


def _actions(batch: list[dict[str, Any]]) -> Small:
    try:
        codes = map(ACTIONS.__getitem__, map(itemgetter("action"), batch))
        return np.fromiter(codes, np.int8, len(batch))
    except (KeyError, TypeError):
        return np.fromiter(
            (_action_code(entry.get("action")) for entry in batch), np.int8, len(batch)
        )


def _action_code(action: object) -> int:
    """Return the code of an action; one that a later torch may know is OTHER."""
    return ACTIONS.get(action, OTHER) if isinstance(action, str) else MISSING


def _column(batch: list[dict[str, Any]], key: str) -> Ints:
    try:
        column = np.fromiter(map(itemgetter(key), batch), np.int64, len(batch))
    except (KeyError, TypeError, ValueError, OverflowError):
        whole = (_whole(entry.get(key)) for entry in batch)
        return np.fromiter(whole, np.int64, len(batch))
    if column.min() < 0 or column.max() >= LARGEST_SIZE:
        column[(column < 0) | (column >= LARGEST_SIZE)] = MISSING
    return column


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value < LARGEST_SIZE else MISSING
