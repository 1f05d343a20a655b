"""Files of a run folder, read with care: in a shared folder others have written them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from stepscope.formatting import terminal_text

TAIL_BYTES = 20_000
SNAPSHOTS = 50
"""Memory snapshots listed at most."""

_SNAPSHOT = re.compile(r"snapshot-[\w.-]{1,100}\.pickle")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A memory snapshot that a run has written; its content is never looked at here."""

    name: str
    size: int


def snapshots(folder: Path) -> tuple[Snapshot, ...]:
    """Return the run's memory snapshots, by name; a link is none."""
    try:
        with os.scandir(folder) as entries:
            found = [
                Snapshot(entry.name, entry.stat(follow_symlinks=False).st_size)
                for entry in entries
                if _SNAPSHOT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return ()
    return tuple(sorted(found, key=lambda snapshot: snapshot.name)[:SNAPSHOTS])


def snapshot_bytes(folder: Path, name: str) -> bytes:
    """Return a snapshot's content. Raises OSError, ValueError for any other file's name."""
    if not _SNAPSHOT.fullmatch(name):
        raise ValueError(f"name: must be a snapshot's, got {name[:100]!r}. Pick one of the list.")
    with open(_open(folder / name), "rb") as file:
        return file.read()


def tail(path: Path, limit: int = TAIL_BYTES) -> str | None:
    """Return the end of a text file as a terminal would show it; None where there is none."""
    try:
        with open(_open(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return None
    text = data.decode(errors="replace")
    if size > limit:
        text = text[text.find("\n") + 1 :]  # the first line is cut
    return terminal_text(text)


def _open(path: Path) -> int:
    """Open a plain file: no link out of the folder, no pipe that would be waited for."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name}: not a plain file")
    return number
