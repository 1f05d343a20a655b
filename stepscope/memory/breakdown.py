"""Divide a device's memory, or the host's, at one moment into parts. Pure.

The parts always sum to the total, to the byte, and none is negative. Readings are taken one after
another, so they can contradict each other. Then the earlier in this order counts, and each is cut
to the room that those before it leave:

1. the total; what is in use; the driver's reserve; free is the rest;
2. of what is in use: what the allocator has reserved, then what the driver counts for this process,
   then what it counts for others; the rest is not attributed;
3. of the reserved: allocated, then the free parts of blocks in use; the rest is cached;
4. of the allocated (on the CPU, of the process): parameters, optimizer state, gradients.

If a reading is missing, the parts that cannot be separated without it are one part, and the notes
give the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class MemoryDomain(StrEnum):
    """Whose memory is divided: that of the GPU that the run trains on, or the host's."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class MemoryCategory:
    """What a part of the ledger is: `help` is one sentence, `short` a label for little room."""

    key: str
    label: str
    help: str
    short: str = ""

    @property
    def color(self) -> str:
        """The name of its color in the page's theme."""
        return f"ledger_{_COLORS.get(self.key, self.key)}"


_COLORS = {
    "process": "whole",
    "allocated": "whole",
    "cache": "cached",
    "optimizer_state": "optimizer",
    "rest": "activations",
}
"""Colors named after another part."""
TENSORS = ("memory/parameters", "memory/optimizer_state", "memory/gradients")
"""The metrics of what holds still among the tensors, in the order in which they are believed."""

_KEPT = (
    MemoryCategory(
        "optimizer_state",
        "optimizer state",
        "Tensors that the optimizers keep, such as Adam's two moments.",
        "optimizer",
    ),
    MemoryCategory(
        "gradients", "gradients", "The parameters' gradients that are held between two steps."
    ),
    MemoryCategory(
        "parameters", "parameters", "The weights that the optimizers update, each storage once."
    ),
)
CATEGORIES: Mapping[MemoryDomain, tuple[MemoryCategory, ...]] = {
    MemoryDomain.DEVICE: (
        MemoryCategory("free", "free", "Unused device memory."),
        MemoryCategory(
            "driver", "driver reserve", "Device memory reserved by the driver.", "driver"
        ),
        MemoryCategory(
            "others",
            "other processes",
            "Device memory of all processes but this one, as the driver counts it.",
            "others",
        ),
        MemoryCategory(
            "unnamed",
            "not attributed",
            "Device memory the driver attributes to no listed process: other containers or "
            "users, graphics, the driver itself.",
        ),
        MemoryCategory(
            "elsewhere",
            "outside PyTorch",
            "Device memory in use that PyTorch's allocator of this process does not hold: its "
            "CUDA context and libraries, and all processes that are not shown apart.",
        ),
        MemoryCategory(
            "outside",
            "this process outside PyTorch",
            "What the driver counts for this process beyond PyTorch's reserve: the CUDA context, "
            "loaded kernels, libraries such as NCCL and cuBLAS.",
            "context",
        ),
        MemoryCategory(
            "process",
            "this process",
            "All device memory of this process; PyTorch's share is unknown.",
        ),
        MemoryCategory(
            "used", "in use (unattributed)", "Device memory in use by unknown processes."
        ),
        MemoryCategory(
            "split",
            "cached, split",
            "Free parts of cached blocks that also hold tensors: fragmentation, which Empty "
            "cache cannot return.",
            "split",
        ),
        MemoryCategory(
            "cached",
            "cached (reclaimable)",
            "Whole cached blocks without tensors: reused next, returned by Empty cache.",
            "cached",
        ),
        MemoryCategory("cache", "cached", "Reserved by PyTorch and not allocated to a tensor now."),
        MemoryCategory(
            "activations",
            "activations and other",
            "Allocated tensors that are neither parameters, gradients nor optimizer state: "
            "activations, batches, buffers, temporary results.",
            "activations",
        ),
        *_KEPT,
        MemoryCategory(
            "allocated", "allocated", "Tensors in PyTorch's allocator, all kinds together."
        ),
    ),
    MemoryDomain.HOST: (
        MemoryCategory(
            "free",
            "available",
            "Host memory a program could get at once: free, or reclaimable cache.",
        ),
        MemoryCategory(
            "others",
            "other processes and the system",
            "Host memory in use by all but this process and its workers.",
            "others",
        ),
        MemoryCategory(
            "elsewhere",
            "outside this process",
            "Host memory in use by all but this process; its workers, if it has any, are in it.",
        ),
        MemoryCategory(
            "used", "in use (unattributed)", "Host memory in use, without word of who uses it."
        ),
        MemoryCategory(
            "workers",
            "its workers",
            "Resident memory of the processes that this one has started, such as data-loading "
            "workers; pages shared with this process count again.",
            "workers",
        ),
        MemoryCategory(
            "rest",
            "rest of this process",
            "Resident memory of this process beside the other parts: activations, data, Python "
            "and its libraries, memory kept for reuse.",
            "rest",
        ),
        *_KEPT,
        MemoryCategory(
            "process", "this process", "Resident memory of this process, all kinds together."
        ),
    ),
}
"""All parts, in the order of table and area, top to bottom. Of those that replace each other (such
as `allocated` for four parts) a moment never has both."""

NOT_RECORDED = "this run has not recorded it"  # The reason where run.json gives none.


def notes(
    parts: Mapping[str, int], place: MemoryDomain, missing: Mapping[str, str]
) -> tuple[str, ...]:
    """Say what could not be told apart, and why; `missing` has the reasons by metric."""
    said = []
    for note in _NOTES[place]:
        if all(key in parts for key in note.present) and note.absent not in parts:
            reason = next((missing[key] for key in note.keys if missing.get(key)), NOT_RECORDED)
            said.append(f"{note.sentence}: {reason.rstrip('.')}.")
    return tuple(said)


@dataclass(frozen=True, slots=True)
class _Note:
    """Said of a ledger that has the parts `present` and lacks `absent`; `keys` are the metrics
    whose absence is the reason."""

    sentence: str
    keys: tuple[str, ...]
    present: tuple[str, ...] = ()
    absent: str | None = None


_NOT_SPLIT = "is not broken down into parameters, gradients, optimizer state and other"
_NOTES: Mapping[MemoryDomain, tuple[_Note, ...]] = {
    MemoryDomain.DEVICE: (
        _Note(
            "Only PyTorch's reserved memory is shown; free memory and other use are unknown",
            ("gpu/mem_used", "gpu/mem_total"),
            absent="free",
        ),
        _Note(
            "The driver's own reserve cannot be told apart from what is in use",
            ("gpu/mem_reserved",),
            ("free",),
            absent="driver",
        ),
        _Note(
            "Other processes cannot be separated from this one's memory outside PyTorch",
            ("memory/process_used", "gpu/mem_others"),
            ("elsewhere",),
            absent="others",
        ),
        _Note(
            "This process outside PyTorch and memory of no named process cannot be told apart",
            ("memory/process_used",),
            ("elsewhere", "others"),
        ),
        _Note(
            "Who holds the memory outside this process is unknown",
            ("gpu/mem_others",),
            ("unnamed",),
            absent="others",
        ),
        _Note(
            "What PyTorch holds of this process's memory is not known",
            ("memory/reserved",),
            ("process",),
        ),
        _Note(
            "What is in use cannot be told apart",
            ("memory/process_used", "memory/reserved"),
            ("used",),
        ),
        _Note(
            "Cached memory is not split into what Empty cache returns and what it cannot",
            ("memory/inactive_split",),
            ("cache",),
        ),
        _Note(f"Allocated memory {_NOT_SPLIT}", TENSORS, ("allocated",)),
    ),
    MemoryDomain.HOST: (
        _Note(
            "Only this process is shown; the host's own memory is not known",
            ("host/mem_used", "host/mem_total"),
            absent="free",
        ),
        _Note("What is in use cannot be told apart", ("process/rss",), ("used",)),
        _Note(
            "Workers and other processes cannot be told apart",
            ("process/children_rss",),
            ("elsewhere",),
        ),
        _Note(f"This process's memory {_NOT_SPLIT}", TENSORS, ("process",)),
    ),
}


Values = Mapping[str, float | None]
CategoryBytes = dict[str, int]


def divide(values: Values, place: MemoryDomain) -> CategoryBytes | None:
    """Return the bytes of each part by its key; None if not even this process's are known.

    `values` are bytes by metric; a value that is absent, None, negative or not finite is missing.
    """
    return _device(values) if place is MemoryDomain.DEVICE else _host(values)


def _bytes(values: Values, key: str) -> int | None:
    value = values.get(key)
    return round(value) if value is not None and math.isfinite(value) and value >= 0 else None


def _device(values: Values) -> CategoryBytes | None:
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


def _in_use(values: Values, used: int) -> CategoryBytes:
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


def _reserved(values: Values, reserved: int) -> CategoryBytes:
    """Divide what PyTorch's allocator has reserved."""
    allocated = min(_bytes(values, "memory/allocated") or 0, reserved)
    split, cache = _bytes(values, "memory/inactive_split"), reserved - allocated
    if split is None:
        parts = {"cache": cache}
    else:
        parts = {"split": min(split, cache), "cached": cache - min(split, cache)}
    return parts | _tensors(values, allocated, whole="allocated", rest="activations")


def _tensors(values: Values, room: int, *, whole: str, rest: str) -> CategoryBytes:
    """Divide what holds the tensors; it is one part where one kind of them is not known."""
    parts, left = {}, room
    for key in TENSORS:
        size = _bytes(values, key)
        if size is None:
            return {whole: room}
        parts[key.removeprefix("memory/")] = min(size, left)
        left -= min(size, left)
    return {rest: left} | parts


def _host(values: Values) -> CategoryBytes | None:
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
