"""Trials of a script: their job, and the processes of a sweep."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def vars_of(script: Any) -> dict[str, Any]:
    return {name: getattr(script, name) for name in script.__dataclass_fields__}


def started_in(sweep: Path) -> list[int]:
    """Return the processes of the sweep's trials."""
    found = []
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"STEPSCOPE_SAMPLE={sweep}".encode() in process.read_bytes():
                found.append(int(process.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]
