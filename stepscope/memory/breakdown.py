"""Where memory goes at one moment: the parts of a device's total, or of the host's. Pure.

The device's total is, from the top: free, the driver's reserve, other processes, this process
outside PyTorch, and what PyTorch's allocator has reserved; that is free parts of blocks in use,
whole cached blocks, and the tensors: activations and the rest, optimizer state, gradients,
parameters. Of a run on the CPU the host's total is divided in the same way.

The parts always sum to the total, to the byte, and none is negative. The readings are taken one
after another, so they can contradict each other. Then they are believed in this order, and each is
cut to the room that those before it leave:

1. the total; what is in use; the driver's reserve; free is the rest;
2. of what is in use: what the allocator has reserved, then what the driver counts for this process,
   then what it counts for others; the rest is not attributed;
3. of the reserved: allocated, then the free parts of blocks in use; the rest is cached;
4. of the allocated (on the CPU, of the process): parameters, optimizer state, gradients: what stays
   for the whole run before what comes and goes.

Where a reading is missing, the parts that cannot be told apart without it are one part, and the
notes say so, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stepscope.memory.ledger_words import CATEGORIES, TENSORS, Category, Place, notes

Values = Mapping[str, float | None]
Amounts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a moment's ledger, in bytes."""

    category: Category
    bytes: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """The parts of one moment, top to bottom, and what could not be told apart, a sentence each.

    `whole` is False where the total of the device or host is not known: then only what this process
    holds is divided.
    """

    place: Place
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    whole: bool

    @property
    def total(self) -> int:
        """The sum of all parts: what the device or the host has."""
        return sum(part.bytes for part in self.parts)


def ledger(values: Values, place: Place, missing: Mapping[str, str] | None = None) -> Ledger | None:
    """Return the ledger of one moment; None where not even this process's memory is known.

    `values` are bytes by metric; a value that is absent, None, negative or no finite number is
    missing. `missing` says why, by metric.
    """
    amounts = divide(values, place)
    if amounts is None:
        return None
    parts = tuple(
        Part(category, amounts[category.key])
        for category in CATEGORIES[place]
        if category.key in amounts
    )
    return Ledger(place, parts, notes(amounts, place, missing or {}), "free" in amounts)


def divide(values: Values, place: Place) -> Amounts | None:
    """Return the bytes of each part by its key: `ledger` without the words."""
    return _device(values) if place is Place.DEVICE else _host(values)


def _bytes(values: Values, key: str) -> int | None:
    value = values.get(key)
    return round(value) if value is not None and math.isfinite(value) and value >= 0 else None


def _device(values: Values) -> Amounts | None:
    total, used = _bytes(values, "gpu/mem_total"), _bytes(values, "gpu/mem_used")
    if total is None or used is None:
        held = _held(values)
        return None if held is None else _reserved(values, held)
    used = min(used, total)
    driver = _bytes(values, "gpu/mem_reserved")
    kept = min(driver or 0, total - used)
    parts = {"free": total - used - kept}
    if driver is not None:
        parts["driver"] = kept
    return parts | _in_use(values, used)


def _in_use(values: Values, used: int) -> Amounts:
    """Divide what all processes use of a device."""
    held, own = _held(values), _bytes(values, "memory/process_used")
    reserved = min(held or 0, used)
    if own is not None:
        own = min(max(own, reserved), used)
    others = _bytes(values, "gpu/mem_others")
    foreign = min(others or 0, used - (reserved if own is None else own))
    parts = {} if others is None else {"others": foreign}
    if own is None:
        parts["used" if held is None else "elsewhere"] = used - reserved - foreign
    else:
        unnamed = used - own - foreign
        if unnamed or others is None:
            parts["unnamed"] = unnamed
        parts["process" if held is None else "outside"] = own - reserved
    return parts if held is None else parts | _reserved(values, reserved)


def _held(values: Values) -> int | None:
    """Return what PyTorch's allocator has reserved: it gives that and the allocated, or neither."""
    allocated, reserved = _bytes(values, "memory/allocated"), _bytes(values, "memory/reserved")
    return None if allocated is None else reserved


def _reserved(values: Values, reserved: int) -> Amounts:
    """Divide what PyTorch's allocator has reserved."""
    allocated = min(_bytes(values, "memory/allocated") or 0, reserved)
    split, cache = _bytes(values, "memory/inactive_split"), reserved - allocated
    if split is None:
        parts = {"cache": cache}
    else:
        parts = {"split": min(split, cache), "cached": cache - min(split, cache)}
    return parts | _tensors(values, allocated, whole="allocated", rest="activations")


def _tensors(values: Values, room: int, *, whole: str, rest: str) -> Amounts:
    """Divide what holds the tensors; it is one part where one kind of them is not known."""
    parts, left = {}, room
    for key in TENSORS:
        size = _bytes(values, key)
        if size is None:
            return {whole: room}
        parts[key.removeprefix("memory/")] = min(size, left)
        left -= min(size, left)
    return {rest: left} | parts


def _host(values: Values) -> Amounts | None:
    total, used = _bytes(values, "host/mem_total"), _bytes(values, "host/mem_used")
    own, workers = _bytes(values, "process/rss"), _bytes(values, "process/children_rss")
    if total is None or used is None:
        if own is None:
            return None
        parts = _tensors(values, own, whole="process", rest="rest")
        return parts if workers is None else {"workers": workers} | parts
    used = min(used, total)
    parts = {"free": total - used}
    if own is None:
        return parts | {"used": used}
    own = min(own, used)
    begun = min(workers or 0, used - own)
    parts["elsewhere" if workers is None else "others"] = used - own - begun
    if workers is not None:
        parts["workers"] = begun
    return parts | _tensors(values, own, whole="process", rest="rest")
