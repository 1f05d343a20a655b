"""The folder of uploaded memory snapshots, and the processes that open snapshots."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from dashboard.run_files import SnapshotFile
from stepscope.common.files import atomic_write
from stepscope.memory.snapshots.load import MAX_FILE_BYTES
from stepscope.memory.snapshots.open_snapshot import SnapshotLoadTask, kept_summary

FOLDER = "snapshots"  # In the runs folder; files that users put there are listed too.
MAX_OPENED = 6  # Opened snapshots whose summaries are kept.
MAX_LISTED = 100
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,119}\.(pickle|pkl)", re.ASCII)
_ENDINGS = (".pickle", ".pkl")


class SnapshotLibrary:
    """Opens snapshots one after the other. Thread-safe."""

    def __init__(self, runs: Path) -> None:
        self.folder = runs / FOLDER
        self._lock = threading.Lock()
        self._opened: OrderedDict[tuple[Path, int, int], SnapshotLoadTask] = OrderedDict()
        self._spare: tempfile.TemporaryDirectory[str] | None = None

    def others(self) -> list[SnapshotFile]:
        """Return the snapshots in the folder, the newest first."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in filter(_is_listed, entries):
                state = entry.stat(follow_symlinks=False)
                file = SnapshotFile(self.folder / entry.name, state.st_size, None)
                found.append((-state.st_mtime, file))
        return [file for _, file in sorted(found, key=lambda one: one[0])[:MAX_LISTED]]

    def opening(self, file: SnapshotFile) -> SnapshotLoadTask | None:
        """Return the task that opens a file; None while another one is opened. Raises OSError."""
        state = file.path.stat(follow_symlinks=False)
        key = (file.path, state.st_size, state.st_mtime_ns)
        with self._lock:
            known, spare = key in self._opened, self._spare_folder()
        # Without the lock: parsing a foreign file must not block other sessions.
        summary = None if known else kept_summary(file.path, spare)
        with self._lock:
            unfinished = [one for one in self._opened.values() if not one.poll()]
            task = self._opened.get(key)
            if task is None:
                if unfinished and summary is None:  # each process may take gigabytes
                    return None
                task = self._opened[key] = SnapshotLoadTask(file.path, spare, summary)
            self._opened.move_to_end(key)
            while len(self._opened) > MAX_OPENED:
                self._opened.popitem(last=False)[1].close()
        return task

    def forget(self, file: SnapshotFile) -> None:
        """Drop the task of a file that could not be opened, so that `opening` tries again."""
        with self._lock:
            for key in [key for key in self._opened if key[0] == file.path]:
                self._opened.pop(key).close()

    def keep(self, name: str, data: bytes | memoryview) -> str:
        """Write an upload into the folder; return its new name. Raises ValueError and OSError."""
        stem, _, ending = upload_name(name).rpartition(".")
        if not 0 < len(data) <= MAX_FILE_BYTES:
            raise ValueError(
                f"The file must have 1 to {MAX_FILE_BYTES:,} bytes, got {len(data):,}."
            )
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = (f"{stem}{f'-{n}' if n > 1 else ''}.{ending}" for n in itertools.count(1))
            free = next(name for name in names if not os.path.lexists(self.folder / name))
            atomic_write(self.folder / free, bytes(data), durable=False)
            return free

    def close(self) -> None:
        """End the processes and delete the temporary folder."""
        with self._lock:
            for task in self._opened.values():
                task.close()
            self._opened.clear()
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


def _is_listed(entry: os.DirEntry[str]) -> bool:
    """Return False for links, hidden names, other endings and control characters."""
    named = entry.name.lower().endswith(_ENDINGS) and not entry.name.startswith(".")
    return named and entry.name.isprintable() and entry.is_file(follow_symlinks=False)
