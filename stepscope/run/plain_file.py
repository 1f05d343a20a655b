"""Reads a file of a run's folder that anybody may have put there."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_plain(path: Path, limit: int) -> bytes:
    """Return what a plain file of at most `limit` bytes holds.

    Raises ValueError for what is none or has more, OSError for a link and what cannot be opened.
    """
    # No link out of the folder, and no pipe that would be waited for.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError(f"{path.name}: not a plain file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name}: must have at most {limit} bytes, got more")
    return data
