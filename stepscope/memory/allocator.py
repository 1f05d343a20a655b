"""Torch's CUDA caching allocator of this process, read without importing torch or calling CUDA.

Torch is found in `sys.modules`, and nothing is read before the program has started CUDA, so no
context is made here. A read takes about 5 us. It holds the GIL while it waits for the allocator's
lock, so while the allocator waits for the driver or the device, a read stops every Python thread.
"""

from __future__ import annotations

import os
import re
import shlex
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


_ENTRY = re.compile(r"([a-z_0-9]+)\s*:\s*(\[[\w:,>. ]*\]|[\w.]+)", re.ASCII)
"""An entry of PYTORCH_ALLOC_CONF: a name and one value, or several in brackets."""


def with_expandable(text: str) -> str:
    """Return the variable's settings with expandable segments, quoted for a shell.

    >>> with_expandable("max_split_size_mb:64,expandable_segments:False")
    'max_split_size_mb:64,expandable_segments:True'
    """
    kept = [
        f"{name}:{''.join(value.split())}"
        for name, value in _ENTRY.findall(text)
        if name != "expandable_segments"
    ]
    return shlex.quote(",".join([*kept, "expandable_segments:True"]))


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of the environment; the first that is set counts."""
NO_SPLIT = "torch does not count the split of expandable segments (expandable_segments:True)"


def environment_text() -> str:
    """Return the settings that the environment gives, as they are written there."""
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def in_force() -> dict[str, str]:
    """Return the settings of the environment, and over them those that the program has set."""
    given = settings_of(environment_text())
    native = getattr(sys.modules.get("torch"), "_C", None)
    ask = getattr(native, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        given |= settings_of(str(ask() or ""))
    return given


def expandable_segments(given: dict[str, str]) -> bool:
    """Say whether the allocator's segments can grow."""
    return given.get("expandable_segments", "False").lower() == "true"


def split_reason() -> str | None:
    """Say why `inactive_split_bytes` is not the free part of blocks in use; None where it is.

    Torch leaves expandable segments out of that counter, so it is near 0 however much is split.
    """
    return NO_SPLIT if expandable_segments(in_force()) else None


def settings_of(text: str) -> dict[str, str]:
    """Return the settings that a text of `PYTORCH_ALLOC_CONF` gives.

    >>> settings_of("max_split_size_mb:64, expandable_segments:True")
    {'max_split_size_mb': '64', 'expandable_segments': 'True'}
    """
    pairs = (part.partition(":") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}
