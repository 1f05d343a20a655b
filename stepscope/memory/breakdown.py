"""Divide a device's memory, or the host's, at one moment into categories; pure, no I/O.

The categories sum to the total, to the byte, and none is negative. Values that are sampled one
after another can contradict each other: each is cut to the bytes that the earlier ones leave, in
the order of docs/memory.md. Categories that cannot be separated without a missing value are merged,
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
            "unnamed",
            "not attributed",
            "Device memory the driver attributes to no listed process: other containers or "
            "users, graphics, the driver itself.",
        ),
        MemoryCategory(
            "elsewhere",
            "outside PyTorch",
            "Device memory outside PyTorch's allocator of this process: its CUDA context and "
            "libraries, and all processes that are not shown separately.",
        ),
        MemoryCategory(
            "outside",
            "this process outside PyTorch",
            "Device memory of this process beyond PyTorch's reserve: the CUDA context, loaded "
            "kernels, libraries such as NCCL and cuBLAS.",
        ),
        MemoryCategory(
            "used", "in use (unattributed)", "Device memory in use by unknown processes."
        ),
        MemoryCategory(
            "split",
            "cached, split",
            "Free parts of cached blocks that also hold tensors: fragmentation, which Empty "
            "cache cannot return.",
        ),
        MemoryCategory(
            "cached",
            "cached (reclaimable)",
            "Whole cached blocks without tensors: reused next, returned by Empty cache.",
        ),
        MemoryCategory("cache", "cached", "Reserved by PyTorch and not allocated to a tensor now."),
        MemoryCategory(
            "activations",
            "activations and other",
            "All other allocated tensors: activations, batches, buffers, temporary results.",
        ),
        *_MODEL_STATES,
        MemoryCategory("allocated", "allocated", "All tensors in PyTorch's allocator."),
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
        ),
        MemoryCategory(
            "elsewhere",
            "outside this process",
            "Host memory in use by all but this process, including its workers.",
        ),
        MemoryCategory("used", "in use (unattributed)", "Host memory in use by unknown processes."),
        MemoryCategory(
            "workers",
            "its workers",
            "Resident memory of this process's children, such as data-loading workers; pages "
            "shared with this process count twice.",
        ),
        MemoryCategory(
            "rest",
            "rest of this process",
            "All other resident memory of this process: activations, data, Python and its "
            "libraries, memory kept for reuse.",
        ),
        *_MODEL_STATES,
        MemoryCategory("process", "this process", "All resident memory of this process."),
    ),
}
"""All categories, in the order of table and area, top to bottom. Of those that replace each other
(such as `allocated` for four categories) a moment never has both."""

NOT_RECORDED = "it was not recorded at this moment"  # The reason if run.json has none.


class _Note(NamedTuple):
    """A sentence for a breakdown with, or without, a category; its reason is that of a metric."""

    category: str
    is_present: bool
    sentence: str
    metrics: tuple[str, ...]


_OWN, _OTHERS = "memory/process_used", "gpu/mem_others"
_NOT_SPLIT = "is not broken down into parameters, gradients, optimizer state and other"
_NOTES: Mapping[MemoryDomain, tuple[_Note, ...]] = {
    MemoryDomain.DEVICE: (
        _Note(
            "free",
            False,
            "Only PyTorch's reserved memory is shown",
            ("gpu/mem_used", "gpu/mem_total"),
        ),
        _Note("driver", False, "The driver's reserve is not separate", ("gpu/mem_reserved",)),
        _Note("others", False, "Other processes are not separate", (_OTHERS,)),
        _Note("elsewhere", True, "This process outside PyTorch is not separate", (_OWN,)),
        _Note("used", True, "PyTorch's memory is unknown", ("memory/reserved",)),
        _Note(
            "cache",
            True,
            "Cached memory is not split into reclaimable and fragmented memory",
            ("memory/inactive_split",),
        ),
        _Note("allocated", True, f"Allocated memory {_NOT_SPLIT}", TENSORS),
    ),
    MemoryDomain.HOST: (
        _Note(
            "free", False, "The host's own memory is unknown", ("host/mem_used", "host/mem_total")
        ),
        _Note("used", True, "This process's memory is unknown", ("process/rss",)),
        _Note("elsewhere", True, "Workers are not separate", ("process/children_rss",)),
        _Note("process", True, f"This process's memory {_NOT_SPLIT}", TENSORS),
    ),
}


def notes(
    categories: Mapping[str, int], place: MemoryDomain, missing: Mapping[str, str]
) -> tuple[str, ...]:
    """Return what is not shown separately, and why; `missing` has the reasons by metric."""
    texts = []
    for note in _NOTES[place]:
        if (note.category in categories) is note.is_present:
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


def _device(known: CategoryBytes) -> CategoryBytes | None:
    total, used = known.get("gpu/mem_total"), known.get("gpu/mem_used")
    # The allocator gives reserved and allocated memory, or neither.
    held = known.get("memory/reserved") if "memory/allocated" in known else None
    if total is None or used is None:
        return None if held is None else _reserved(known, held)
    used = min(used, total)
    driver = known.get("gpu/mem_reserved")
    kept = min(driver or 0, total - used)
    categories = {"free": total - used - kept}
    if driver is not None:
        categories["driver"] = kept
    return categories | _in_use(known, held, used)


def _in_use(known: CategoryBytes, held: int | None, used: int) -> CategoryBytes:
    own, others = known.get(_OWN), known.get(_OTHERS)
    if held is None:
        return {"used": used}
    reserved = min(held, used)
    own = None if own is None else min(max(own, reserved), used)
    foreign = min(others or 0, used - (own or reserved))
    categories = {} if others is None else {"others": foreign}
    if own is None:
        categories["elsewhere"] = used - reserved - foreign
    else:
        unnamed = used - own - foreign
        if unnamed or others is None:
            categories["unnamed"] = unnamed
        categories["outside"] = own - reserved
    return categories | _reserved(known, reserved)


def _reserved(known: CategoryBytes, reserved: int) -> CategoryBytes:
    allocated = min(known.get("memory/allocated", 0), reserved)
    split, cache = known.get("memory/inactive_split"), reserved - allocated
    if split is None:
        categories = {"cache": cache}
    else:
        categories = {"split": min(split, cache), "cached": cache - min(split, cache)}
    return categories | _tensors(known, allocated, whole="allocated", rest="activations")


def _tensors(known: CategoryBytes, size: int, *, whole: str, rest: str) -> CategoryBytes:
    """Divide the memory of all tensors; one category if a model state is unknown."""
    if not known.keys() >= set(TENSORS):
        return {whole: size}
    categories = {}
    for key in TENSORS:
        categories[key.removeprefix("memory/")] = min(known[key], size)
        size -= min(known[key], size)
    return {rest: size} | categories


def _host(known: CategoryBytes) -> CategoryBytes | None:
    total, used = known.get("host/mem_total"), known.get("host/mem_used")
    own, workers = known.get("process/rss"), known.get("process/children_rss")
    if total is None or used is None:
        if own is None:
            return None
        categories = _tensors(known, own, whole="process", rest="rest")
        return categories if workers is None else {"workers": workers} | categories
    used = min(used, total)
    categories = {"free": total - used}
    if own is None:
        return categories | {"used": used}
    own = min(own, used)
    children = min(workers or 0, used - own)
    categories["elsewhere" if workers is None else "others"] = used - own - children
    if workers is not None:
        categories["workers"] = children
    return categories | _tensors(known, own, whole="process", rest="rest")
