"""What a run hung in before it ended: the ranks have written it while they hung."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stepscope.run.plain_file import read_plain

BYTES_LIMIT = 2**20
FILES_LIMIT = 64
TEXT_LIMIT = 500


def hung_in(folder: Path) -> str | None:
    """Return the cause of the hang in which a run's ranks ended; None where they did not hang.

    A rank removes its file once its steps go on, so one that is left is of the end. Which rank
    knows the cause is not certain: the newest one that names it counts.
    """
    found = [told for name in _names(folder) if (told := _named(folder / name)) is not None]
    return max(found)[1] if found else None


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("hang-rank")]
    except OSError:
        return []
    return sorted(names)[:FILES_LIMIT]


def _named(path: Path) -> tuple[float, str] | None:
    """Return when a rank wrote the cause, and the cause."""
    try:
        told: Any = json.loads(read_plain(path, BYTES_LIMIT))
        text = told["named"]["what"]
        return (float(told["seen"]), text[:TEXT_LIMIT]) if isinstance(text, str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
