"""Torch's CUDA caching allocator of this process, read without importing torch or calling CUDA.

Nothing is read before the program has started CUDA, so no context is created here. A read takes
about 5 us. It holds the GIL while it waits for the allocator's lock, so while the allocator waits
for the driver or the device, a read stops every Python thread.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any

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
COUNTS = ("memory/alloc_retries", "memory/ooms")  # Of the process, also of earlier runs.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # The first that is set counts.
NO_SPLIT = "torch does not count the split of expandable segments (expandable_segments:True)"
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(\w+)", re.ASCII)


def read(device_index: int) -> dict[str, float]:
    """Return a CUDA device's counters; {} if `reason()`. Raises RuntimeError for a bad index."""
    if reason() is not None:
        return {}
    stats = sys.modules["torch"].cuda.memory_stats_as_nested_dict(device_index)
    values = {key: _follow(stats, path) for key, path in _PATHS.items()}
    if _omits_split():
        del values["memory/inactive_split"]
    return {key: value for key, value in values.items() if value is not None}


def reason() -> str | None:
    """Return why `read` has no counters; None if it has."""
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
    """Return the COUNTS of each device so far; {} before CUDA has been started."""
    devices = range(sys.modules["torch"].cuda.device_count()) if reason() is None else ()
    return {
        index: {key: value for key, value in read(index).items() if key in COUNTS}
        for index in devices
    }


def settings_in_force() -> str:
    """Return the settings of the environment and then those of the program: the later ones count.

    They have the form of PYTORCH_ALLOC_CONF.
    """
    environment = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    native = getattr(sys.modules.get("torch"), "_C", None)
    program = getattr(native, "_accelerator_getAllocatorSettings", str)()
    return ",".join(filter(None, (environment, program)))


def has_expandable_segments(settings: str) -> bool:
    """Return True if the allocator's segments can grow.

    >>> has_expandable_segments("expandable_segments:False,expandable_segments: true")
    True
    """
    values = _EXPANDABLE.findall(settings)
    return bool(values) and values[-1].lower() == "true"


@functools.cache  # the settings hold from the start of CUDA on
def _omits_split() -> bool:
    return split_reason() is not None


def split_reason() -> str | None:
    """Return why `inactive_split_bytes` omits the free parts of blocks; None if it has them."""
    return NO_SPLIT if has_expandable_segments(settings_in_force()) else None
