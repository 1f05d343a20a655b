"""The value of PYTORCH_ALLOC_CONF with one more setting. Pure."""

from __future__ import annotations

import re
import shlex

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
