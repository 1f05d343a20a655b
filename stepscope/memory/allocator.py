"""Torch's CUDA caching allocator of this process, read without importing torch or calling CUDA.

Nothing is read before the program has started CUDA, so no context is created here. A read takes
about 5 us. It holds the GIL while it waits for the allocator's lock, so while the allocator waits
for the driver or the device, a read stops every Python thread.
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
COUNTS = ("memory/alloc_retries", "memory/ooms")  # Of the process, also of earlier runs.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # The first that is set counts.
NO_SPLIT = "torch does not count the split of expandable segments (expandable_segments:True)"
_ENTRY = re.compile(r"([a-z_0-9]+)\s*:\s*(\[[\w:,>. ]*\]|[\w.]+)", re.ASCII)
"""An entry of PYTORCH_ALLOC_CONF: a name and one value, or several in brackets."""


def read(device_index: int) -> dict[str, float]:
    """Return a CUDA device's counters; {} if `reason()`. Raises RuntimeError for a bad index."""
    if reason() is not None:
        return {}
    stats = sys.modules["torch"].cuda.memory_stats_as_nested_dict(device_index)
    values = {key: _follow(stats, path) for key, path in _PATHS.items()}
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


def with_expandable(text: str) -> str:
    """Return the variable's settings with expandable segments, quoted for a shell.

    >>> with_expandable("max_split_size_mb:64,expandable_segments:False")
    'max_split_size_mb:64,expandable_segments:True'
    """
    settings = settings_of(text) | {"expandable_segments": "True"}
    return shlex.quote(",".join(f"{name}:{value}" for name, value in settings.items()))


def environment_text() -> str:
    """Return the settings in the environment as text."""
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def in_force() -> dict[str, str]:
    """Return the settings of the environment, overridden by those that the program has set."""
    native = getattr(sys.modules.get("torch"), "_C", None)
    get_settings = getattr(native, "_accelerator_getAllocatorSettings", str)
    return settings_of(environment_text()) | settings_of(str(get_settings() or ""))


def expandable_segments(settings: dict[str, str]) -> bool:
    """Return True if the allocator's segments can grow."""
    return settings.get("expandable_segments", "False").lower() == "true"


def split_reason() -> str | None:
    """Return why `inactive_split_bytes` omits the free parts of blocks; None if it has them."""
    return NO_SPLIT if expandable_segments(in_force()) else None


def settings_of(text: str) -> dict[str, str]:
    """Return the settings in a text of `PYTORCH_ALLOC_CONF`.

    >>> settings_of("max_split_size_mb:64, expandable_segments:True")
    {'max_split_size_mb': '64', 'expandable_segments': 'True'}
    """
    return {name: "".join(value.split()) for name, value in _ENTRY.findall(text)}
