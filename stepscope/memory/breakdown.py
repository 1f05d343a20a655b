"""Divide a device's memory, or the host's, at one moment into categories; pure, no I/O.

The categories sum to the total, to the byte, and none is negative. Values that are sampled one
after another can contradict each other: each is cut to the bytes that the earlier ones leave, in
the order of docs/memory.md. A category whose value is missing belongs to the remainder beside it,
and the notes give the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class MemoryDomain(StrEnum):
    """Whose memory is divided: that of the GPU that the run trains on, or the host's."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class MemoryCategory:
    """A category of memory; `help` is one sentence."""

    key: str
    label: str
    help: str


TENSORS = ("memory/parameters", "memory/optimizer_state", "memory/gradients")
"""The metrics of the model states, in the order of their precedence."""

_MODEL_STATES = (
    MemoryCategory(
        "optimizer_state",
        "optimizer state",
        "Tensors that the optimizers keep, such as Adam's two moments.",
    ),
    MemoryCategory("gradients", "gradients", "The parameters' gradients held between two steps."),
    MemoryCategory(
        "parameters", "parameters", "The weights that the optimizers update, each storage once."
    ),
)
CATEGORIES: Mapping[MemoryDomain, tuple[MemoryCategory, ...]] = {
    MemoryDomain.DEVICE: (
        MemoryCategory("free", "free", "Unused device memory."),
        MemoryCategory("driver", "driver reserve", "Device memory reserved by the driver."),
        MemoryCategory("others", "other processes", "Device memory of all processes but this one."),
        MemoryCategory(
            "elsewhere",
            "not attributed",
            "Device memory in use that no other category shows: of other containers or users, "
            "graphics, the driver, and of processes whose memory is unknown.",
        ),
        MemoryCategory(
            "outside",
            "this process outside PyTorch",
            "Device memory of this process beyond PyTorch's reserve: the CUDA context, loaded "
            "kernels, libraries such as NCCL and cuBLAS.",
        ),
        MemoryCategory(
            "split",
            "cached, split",
            "Free parts of cached blocks that also hold tensors: fragmentation, which Empty "
            "cache cannot return.",
        ),
        MemoryCategory(
            "cached",
            "cached",
            "Other cached blocks, without tensors: reused next, returned by Empty cache.",
        ),
        MemoryCategory(
            "activations",
            "activations and other",
            "Allocated tensors that are not listed below: activations, batches, buffers, "
            "temporary results.",
        ),
        *_MODEL_STATES,
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
            "Host memory in use that no other category shows.",
        ),
        MemoryCategory(
            "workers",
            "its workers",
            "Memory that only this process's children have, such as data-loading workers, "
            "without pages that they share with it.",
        ),
        MemoryCategory(
            "rest",
            "rest of this process",
            "Resident memory of this process that is not listed below: activations, data, Python "
            "and its libraries, memory kept for reuse.",
        ),
        *_MODEL_STATES,
    ),
}
"""All categories, in the order of table and area, top to bottom."""

NOT_RECORDED = "it was not recorded at this moment"  # The reason if run.json has none.


class _Note(NamedTuple):
    """A sentence for a breakdown without a category, whose reason is that of a metric.

    It applies only with the category `within`, if any.
    """

    category: str
    within: str | None
    sentence: str
    metrics: tuple[str, ...]


_OWN = "memory/process_used"
_NOT_SPLIT = "Parameters, gradients and optimizer state are not separate"
_NOTES: Mapping[MemoryDomain, tuple[_Note, ...]] = {
    MemoryDomain.DEVICE: (
        _Note(
            "free",
            None,
            "Only PyTorch's reserved memory is shown",
            ("gpu/mem_used", "gpu/mem_total"),
        ),
        _Note("driver", "free", "The driver's reserve is not separate", ("gpu/mem_reserved",)),
        _Note("others", "free", "Other processes are not separate", ("gpu/mem_others",)),
        _Note("outside", "free", "This process outside PyTorch is not separate", (_OWN,)),
        _Note("cached", "free", "PyTorch's memory is unknown", ("memory/reserved",)),
        _Note("split", "cached", "Fragmented memory is not separate", ("memory/inactive_split",)),
        _Note("parameters", "cached", _NOT_SPLIT, TENSORS),
    ),
    MemoryDomain.HOST: (
        _Note(
            "free", None, "The host's own memory is unknown", ("host/mem_used", "host/mem_total")
        ),
        _Note("rest", None, "This process's memory is unknown", ("process/rss",)),
        _Note("workers", None, "Workers are not separate", ("process/children_rss",)),
        _Note("parameters", "rest", _NOT_SPLIT, TENSORS),
    ),
}


def notes(
    categories: Mapping[str, int], place: MemoryDomain, missing: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what is not shown separately, and why; `missing` has the reasons by metric."""
    texts = []
    for note in _NOTES[place]:
        applies = note.within is None or note.within in categories
        if applies and note.category not in categories:
            reason = next((missing[key] for key in note.metrics if missing.get(key)), NOT_RECORDED)
            texts.append(f"{note.sentence}: {reason.rstrip('.')}.")
    return tuple(texts)


Values = Mapping[str, float | None]
CategoryBytes = dict[str, int]


def divide(values: Values, place: MemoryDomain) -> CategoryBytes | None:
    """Return the bytes of each category by its key; None if not even this process's are known."""
    # A value that is None, negative or not finite is missing.
    known = {
        key: round(value)
        for key, value in values.items()
        if value is not None and math.isfinite(value) and value >= 0
    }
    return _device(known) if place is MemoryDomain.DEVICE else _host(known)


def _split(size: int, parts: Mapping[str, int | None], rest: str) -> CategoryBytes:
    """Return the known parts of `size`, each cut to what the earlier ones leave, and the rest."""
    found = {}
    for key, part in parts.items():
        if part is not None:
            found[key] = min(part, size)
            size -= found[key]
    found[rest] = size
    return found


def _device(known: CategoryBytes) -> CategoryBytes | None:
    total, used = known.get("gpu/mem_total"), known.get("gpu/mem_used")
    # The allocator gives reserved and allocated memory, or neither.
    reserved = known.get("memory/reserved") if "memory/allocated" in known else None
    if total is None or used is None:
        return None if reserved is None else _reserved(known, reserved)
    categories = _split(total, {"used": used, "driver": known.get("gpu/mem_reserved")}, "free")
    own = known.get(_OWN)
    in_use = _split(
        categories.pop("used"),
        {
            "reserved": reserved,
            "outside": None if own is None else max(0, own - (reserved or 0)),
            "others": known.get("gpu/mem_others"),
        },
        "elsewhere",
    )
    if not in_use["elsewhere"]:
        del in_use["elsewhere"]
    if reserved is not None:
        in_use |= _reserved(known, in_use.pop("reserved"))
    return categories | in_use


def _reserved(known: CategoryBytes, reserved: int) -> CategoryBytes:
    """Divide the memory that PyTorch has reserved."""
    parts = {"allocated": known["memory/allocated"], "split": known.get("memory/inactive_split")}
    categories = _split(reserved, parts, "cached")
    return categories | _tensors(known, categories.pop("allocated"), "activations")


def _tensors(known: CategoryBytes, size: int, rest: str) -> CategoryBytes:
    """Divide the memory of all tensors, or of a process, into the model states and the rest."""
    return _split(size, {key.removeprefix("memory/"): known.get(key) for key in TENSORS}, rest)


def _host(known: CategoryBytes) -> CategoryBytes | None:
    total, used = known.get("host/mem_total"), known.get("host/mem_used")
    own, workers = known.get("process/rss"), known.get("process/children_rss")
    parts = {"process": own, "workers": workers}
    if total is not None and used is not None:
        categories = _split(total, {"used": used}, "free")
        categories |= _split(categories.pop("used"), parts, "others")
    elif own is not None:
        categories = {key: size for key, size in parts.items() if size is not None}
    else:
        return None
    if own is not None:
        categories |= _tensors(known, categories.pop("process"), "rest")
    return categories
