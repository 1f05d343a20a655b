"""The runs that were cut out of a snapshot's bytes, as rows of its history."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from stepscope.memory.snapshots.pickle_loader import Regular
from stepscope.memory.snapshots.pickle_pattern import FRAMES, NUMBER, TEXT, Ints
from stepscope.memory.snapshots.segments import LARGEST_SIZE
from stepscope.memory.snapshots.stacks import NO_STACK, Stacks
from stepscope.memory.snapshots.trace import ALLOC, MISSING, Columns, Labels, action_code

TABLE_LIMIT = 2**22
Remembered = Callable[[Iterable[int]], list[object]]


class NotActions(Exception):
    """The dicts that were cut out are not what a history consists of."""


def columns_of(
    regular: Regular, remembered: Remembered, stacks: Stacks, labels: Labels
) -> Columns | None:
    """Return the rows of all runs, one after the other; None where there are none.

    `remembered` returns what stood at places of the pickle's memo. Raises NotActions.
    """
    if regular.form is None or not regular.lengths:
        return None
    fields = _fields(regular, remembered)
    frames_at = sorted({place for places in regular.stacks for place in places})
    frame = dict(zip(frames_at, remembered(frames_at), strict=True))
    stacks.alias([[frame[place] for place in places] for places in regular.stacks])
    labels.alias(regular.texts)
    codes = _looked_up(regular, fields["action"], remembered, action_code)
    if (codes == MISSING).any():
        raise NotActions
    allocates = codes == ALLOC
    phase = np.full(len(codes), MISSING, np.int16)
    if "user_metadata" in fields:
        found = _looked_up(regular, fields["user_metadata"], remembered, labels.place)
        phase[allocates] = found[allocates]
    stack = np.full(len(codes), NO_STACK, np.int32)
    if "frames" in fields:
        frames = regular.column(fields["frames"])
        stack[allocates] = _stacks(frames[allocates], remembered, stacks)
    return (
        codes.astype(np.int8),
        _whole(regular, fields.get("addr"), len(codes)),
        _whole(regular, fields.get("size"), len(codes)),
        _whole(regular, fields.get("time_us"), len(codes)),
        stack,
        phase,
    )


def _fields(regular: Regular, remembered: Remembered) -> dict[str, int]:
    """Return the fields that are rows' columns, by name. Raises NotActions."""
    assert regular.form is not None
    places = [int.from_bytes(key[1:], "little") for key in regular.form.keys]
    kinds = {"action": TEXT, "user_metadata": TEXT, "frames": FRAMES}
    kinds |= dict.fromkeys(("addr", "size", "time_us"), NUMBER)
    names = dict(zip(map(str, remembered(places)), range(len(places)), strict=False))
    fields = {name: names[name] for name in kinds if name in names}
    wrong = [name for name, field in fields.items() if regular.form.kinds[field] != kinds[name]]
    if wrong or "action" not in fields:
        raise NotActions
    return fields


def _looked_up(
    regular: Regular, field: int, remembered: Remembered, meaning: Callable[[object], int]
) -> Ints:
    """Return for each text, or reference to one, what it means."""
    values, which = _distinct(regular.column(field))
    texts = [regular.texts[value] for value in values.tolist() if value >= 0]
    # The smallest are references, and so come first; theirs may be a number of a text that was cut.
    objects = remembered([-2 - value for value in values.tolist() if value < 0])
    elsewhere = [
        regular.texts[one] if type(one) is int and 0 <= one < len(regular.texts) else one
        for one in objects
    ]
    return np.array([meaning(one) for one in (*elsewhere, *texts)], np.int64)[which]


def _distinct(column: Ints) -> tuple[Ints, Ints]:
    """Return the distinct values and which of them each one is, as np.unique does.

    It is quicker where they lie close together: it sorts nothing.
    """
    low = int(column.min())
    if int(column.max()) - low > TABLE_LIMIT:
        values, which = np.unique(column, return_inverse=True)
        return values, which
    there = np.bincount(column - low) > 0
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[column - low]


def _stacks(frames: Ints, remembered: Remembered, stacks: Stacks) -> NDArray[np.int64]:
    """Return the numbers of stacks: of lists that stood in the runs, and of those elsewhere."""
    here = frames >= 0
    found = np.full(len(frames), NO_STACK, np.int64)
    numbers = np.array([stacks.number(n) for n in range(stacks.aliases)] or [NO_STACK], np.int64)
    found[here] = numbers[frames[here]]
    places, which = np.unique(-2 - frames[~here], return_inverse=True)
    elsewhere = [stacks.number(one) for one in remembered(places.tolist())]
    found[~here] = np.array(elsewhere, np.int64)[which]
    return found


def _whole(regular: Regular, field: int | None, count: int) -> Ints:
    if field is None:
        return np.full(count, MISSING, np.int64)
    column = regular.column(field)
    column[(column < 0) | (column >= LARGEST_SIZE)] = MISSING
    return column
