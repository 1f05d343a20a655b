"""What a run hung in before it ended: the ranks have written it while they hung."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stepscope.common.files import read_regular_file

BYTES_LIMIT = 2**20
FILES_LIMIT = 64
TEXT_LIMIT = 500


def hung_in(folder: Path) -> str | None:
    """Return the cause of the hang in which a run's ranks ended; None where they did not hang.

    A rank removes its file once its steps go on, so one that is left is of the end. The first
    rank that hung has named the cause for all.
    """
    named = (_named(folder / name) for name in _names(folder))
    return next((text for text in named if text is not None), None)


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("hang-rank")]
    except OSError:
        return []
    return sorted(names, key=lambda name: (len(name), name))[:FILES_LIMIT]  # by number


def _named(path: Path) -> str | None:
    try:
        told: Any = json.loads(read_regular_file(path, BYTES_LIMIT))
        text = told["named"]["what"]
        return text[:TEXT_LIMIT] if isinstance(text, str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
