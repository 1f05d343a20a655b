"""The memory snapshots that the page offers, and their opening in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from dashboard.run_files import natural, snapshots
from stepscope.common.files import atomic_write
from stepscope.common.formatting import format_bytes
from stepscope.memory.snapshots.load import MAX_FILE_BYTES
from stepscope.memory.snapshots.open_snapshot import SnapshotLoadTask, kept_summary

FOLDER = "snapshots"
"""Below the folder of all runs: what was uploaded, and what anybody puts there."""
KEPT = 6  # Openings kept, with their summaries.
LISTED = 100
TOTAL_LIMIT = 16 * 2**30  # Bytes in the folder of snapshots up to which an upload is taken.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,119}\.(pickle|pkl)", re.ASCII)
_ENDINGS = (".pickle", ".pkl")


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot that can be chosen; `run` is the run that took it, None for one from elsewhere."""

    path: Path
    size: int
    run: str | None

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name


class SnapshotLibrary:
    """Opens snapshots one after the other; every method may be called from any session's thread."""

    def __init__(self, runs: Path) -> None:
        self.folder = runs / FOLDER
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Path, int, int], SnapshotLoadTask] = OrderedDict()
        self._spare: tempfile.TemporaryDirectory[str] | None = None

    def of_run(self, folder: Path) -> list[SnapshotFile]:
        """Return the snapshots that a run has taken, the newest first."""
        found = [
            SnapshotFile(folder / found.name, found.size, folder.name)
            for found in snapshots(folder)
        ]
        return sorted(found, key=lambda file: natural(file.name), reverse=True)

    def others(self) -> list[SnapshotFile]:
        """Return the plain files in the folder of snapshots, the newest first."""
        found = [(state, name) for state, name in self._files() if _is_listed(name)]
        found.sort(key=lambda one: -one[0].st_mtime)
        return [SnapshotFile(self.folder / name, at.st_size, None) for at, name in found[:LISTED]]

    def kept_bytes(self) -> int:
        """Return the size of all plain files in the folder of snapshots."""
        return sum(state.st_size for state, _ in self._files())

    def _files(self) -> list[tuple[os.stat_result, str]]:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            files = [(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
            return [(state, name) for state, name in files if stat.S_ISREG(state.st_mode)]
        return []

    def opening(self, file: SnapshotFile) -> SnapshotLoadTask | None:
        """Return the opening of a file as of now; None while another file is being opened.

        Raises OSError.
        """
        state = file.path.stat(follow_symlinks=False)
        key = (file.path, state.st_size, state.st_mtime_ns)
        with self._lock:
            known, spare = key in self._kept, self._spare_folder()
        # Others need not wait while a foreign file is parsed.
        summary = None if known else kept_summary(file.path, spare)
        with self._lock:
            running = [one for one in self._kept.values() if not one.poll()]
            found = self._kept.get(key)
            if found is None:
                if running and summary is None:  # each may take gigabytes
                    return None
                found = self._kept[key] = SnapshotLoadTask(file.path, self._spare_folder(), summary)
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)[1].close()
        return found

    def forget(self, file: SnapshotFile) -> None:
        """Let a file that could not be opened be tried again."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == file.path]:
                self._kept.pop(key).close()

    def keep(self, name: str, data: bytes | memoryview) -> str:
        """Write an uploaded snapshot into the folder and return its name there.

        No file is replaced: a second one of a name gets a number. Raises ValueError for a name or
        size that is not a snapshot's, and OSError.
        """
        stem, _, ending = upload_name(name).rpartition(".")
        with self._lock:
            refused = too_large(len(data), self.kept_bytes())
            if refused is not None:
                raise ValueError(refused)
            self.folder.mkdir(parents=True, exist_ok=True)
            names = (f"{stem}{f'-{n}' if n > 1 else ''}.{ending}" for n in itertools.count(1))
            free = next(name for name in names if not os.path.lexists(self.folder / name))
            atomic_write(self.folder / free, bytes(data), durable=False)
            return free

    def close(self) -> None:
        """End what is being opened."""
        with self._lock:
            for one in self._kept.values():
                one.close()
            self._kept.clear()
            if self._spare is not None:
                self._spare.cleanup()
                self._spare = None

    def _spare_folder(self) -> Path:
        if self._spare is None:
            self._spare = tempfile.TemporaryDirectory(prefix="stepscope-snapshots-")
        return Path(self._spare.name)


def upload_name(name: str) -> str:
    """Return a plain file name for an upload. Raises ValueError.

    >>> upload_name("my snapshot (2).pickle")
    'my-snapshot-2.pickle'
    """
    stem, _, ending = name.rpartition(".")
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip(".-_ ")[:100] or "snapshot"
    checked = f"{plain}.{ending.lower()}"
    if not _NAME.fullmatch(checked):
        raise ValueError(f"name: must end in .pickle or .pkl, got {name[-40:]!r}.")
    return checked


def too_large(size: int, kept: int) -> str | None:
    """Return why a file of this size is refused when `kept` bytes are stored; None if accepted."""
    if size == 0:
        return "The file must not be empty."
    if size > MAX_FILE_BYTES:
        return (
            f"The file must have at most {MAX_FILE_BYTES:,} bytes, got {size:,}. "
            "Record fewer steps, or with a lower max_entries."
        )
    if size + kept > TOTAL_LIMIT:
        return (
            f"The folder {FOLDER} must have at most {format_bytes(TOTAL_LIMIT)}, got "
            f"{format_bytes(kept)} and a file of {format_bytes(size)}. Delete snapshots there."
        )
    return None


def _is_listed(name: str) -> bool:
    """Say whether a file of this name is offered; control characters and broken text are not."""
    hidden = name.startswith(".")
    return name.lower().endswith(_ENDINGS) and not hidden and name.isprintable()
