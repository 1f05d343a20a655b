"""The figures in the text of torch's OutOfMemoryError, for a failure that nobody captured. Pure."""

from __future__ import annotations

import re
from typing import Any

from stepscope.memory.oom.record import Holder

_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SENTENCES = {
    "requested": rf"[Tt]ried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed",
    "own": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
}
_CACHED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_PROCESS = re.compile(rf"Process ([0-9]{{1,10}}) has {_SIZE} memory in use")
_HOST = re.compile(r"tried to allocate ([0-9]{1,18}) bytes")
TEXT_LIMIT = 4000


def figures_in(text: str) -> dict[str, Any]:
    """Return what the message of an OutOfMemoryError says, by the names of a record.

    Its sizes have two decimals of their unit, and the counters are of before the stack unwound.

    >>> figures_in("CUDA out of memory. Tried to allocate 2.00 GiB.")
    {'requested': 2147483648}
    """
    text = text[:TEXT_LIMIT]
    found: dict[str, Any] = {}
    for name, pattern in _SENTENCES.items():
        told = re.search(pattern, text)
        if told is not None:
            found[name] = _bytes(told.group(1), told.group(2))
    cached = _CACHED.search(text)
    if cached is not None and "allocated" in found:
        found["reserved"] = found["allocated"] + _bytes(cached.group(1), cached.group(2))
    processes = tuple(
        Holder(pid=int(pid), memory=_bytes(size, unit))
        for pid, size, unit in _PROCESS.findall(text)
    )
    if processes:
        found["processes"] = processes
    return found


def bytes_in(text: str) -> int | None:
    """Return the bytes that a message of the CPU's allocator names; None where it names none."""
    found = _HOST.search(text[:TEXT_LIMIT])
    return int(found.group(1)) if found else figures_in(text).get("requested")


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
