"""The settings of torch's CUDA caching allocator that are in force, read without calling CUDA."""

from __future__ import annotations

import os
import sys

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
