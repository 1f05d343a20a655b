"""Reads a file of a run's folder that anybody may have put there."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_plain(path: Path, *, links: bool = False) -> int:
    """Open a plain file: no pipe that would be waited for, and no link but with `links`.

    Raises OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name}: not a plain file")
    return number


def read_plain(path: Path, limit: int, *, links: bool = False) -> bytes:
    """Return what a plain file of at most `limit` bytes holds.

    Raises ValueError for one that has more, OSError for what is none and what cannot be opened.
    """
    with open(open_plain(path, links=links), "rb") as file:
        # Room for the whole limit would cost more than the reading.
        data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name}: must have at most {limit} bytes, got more")
    return data
