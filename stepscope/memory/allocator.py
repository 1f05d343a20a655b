"""Torch's CUDA caching allocator of this process, read without importing torch or calling CUDA.

Torch is found in `sys.modules`, and nothing is read before the program has started CUDA, so no
context is made here. A read takes about 5 us. It holds the GIL while it waits for the allocator's
lock, so while the allocator waits for the driver or the device, a read stops every Python thread.
"""

from __future__ import annotations

import sys
from typing import Any

REPEATED_S = 5.0
"""How long a reading stands for the counters: in a longer phase they are not known."""

_PATHS: dict[str, tuple[str, ...]] = {
    "memory/allocated": ("allocated_bytes", "all", "current"),
    "memory/reserved": ("reserved_bytes", "all", "current"),
    "memory/peak_allocated": ("allocated_bytes", "all", "peak"),
    "memory/peak_reserved": ("reserved_bytes", "all", "peak"),
    "memory/active": ("active_bytes", "all", "current"),
    "memory/inactive_split": ("inactive_split_bytes", "all", "current"),
    "memory/alloc_retries": ("num_alloc_retries",),
    "memory/ooms": ("num_ooms",),
}
COUNTS = ("memory/alloc_retries", "memory/ooms")
"""Counters of the whole process, which may have had runs before this one."""


def read(device_index: int) -> dict[str, float]:
    """Return the allocator's counters of CUDA device `device_index`; {} where `reason()` says why.

    Raises RuntimeError (torch's own) for an index that does not exist.
    """
    if reason() is not None:
        return {}
    stats = sys.modules["torch"].cuda.memory_stats_as_nested_dict(device_index)
    values = {key: _follow(stats, path) for key, path in _PATHS.items()}
    return {key: value for key, value in values.items() if value is not None}


def reason() -> str | None:
    """Say why `read` has nothing to read; None when it has."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported in this process"
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hasattr(cuda, "memory_stats_as_nested_dict"):
        return "torch is still being imported"
    if not cuda.is_initialized():
        return "CUDA has not been started in this process"
    return None


def _follow(stats: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        if name not in stats:
            return None
        stats = stats[name]
    return float(stats)


def counts_by_device() -> dict[int, dict[str, float]]:
    """Return what each device has counted so far; nothing where CUDA has not been started."""
    if reason() is not None:
        return {}
    found = {index: read(index) for index in range(sys.modules["torch"].cuda.device_count())}
    return {
        index: {key: values[key] for key in COUNTS if key in values}
        for index, values in found.items()
    }
