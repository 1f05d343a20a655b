"""The memory snapshots that the page offers, and their opening in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dashboard.run_files import natural, snapshots
from stepscope.common.formatting import format_bytes
from stepscope.memory.snapshots.load import SIZE_LIMIT
from stepscope.memory.snapshots.open_snapshot import SnapshotLoadTask, kept_summary

FOLDER = "snapshots"
"""Below the folder of all runs: what was uploaded, and what anybody puts there."""
KEPT = 6
"""Openings kept, with their summaries."""
LISTED = 100
TOTAL_LIMIT = 16 * 2**30
"""Bytes in the folder of snapshots up to which an upload is taken."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,119}\.(pickle|pkl)", re.ASCII)


_ENDINGS = (".pickle", ".pkl")
_PART = ".upload-"
"""How the names of uploads begin that have not arrived whole."""
PART_AGE_S = 86_400.0
"""Age from which such a file is a leftover of a server that was killed."""


@dataclass(slots=True)
class Upload:
    """A snapshot that arrives: what to write it to, and its name, final once it is there."""

    file: BinaryIO
    name: str


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
        self._uploading = threading.Lock()
        self._kept: OrderedDict[tuple[Path, int, int], SnapshotLoadTask] = OrderedDict()
        self._spare: tempfile.TemporaryDirectory[str] | None = None
        self._part: Path | None = None
        self._remove_leftovers()

    def of_run(self, folder: Path) -> list[SnapshotFile]:
        """Return the snapshots that a run has taken, the newest first."""
        found = [
            SnapshotFile(folder / found.name, found.size, folder.name)
            for found in snapshots(folder)
        ]
        return sorted(found, key=lambda file: natural(file.name), reverse=True)

    def others(self) -> list[SnapshotFile]:
        """Return the plain files in the folder of snapshots, the newest first."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            found = [
                (entry.stat(follow_symlinks=False), entry.name)
                for entry in entries
                if _is_listed(entry.name) and entry.is_file(follow_symlinks=False)
            ]
            found.sort(key=lambda one: -one[0].st_mtime)
            return [
                SnapshotFile(self.folder / name, state.st_size, None)
                for state, name in found[:LISTED]
            ]
        return []

    def kept_bytes(self) -> int:
        """Return the size of all plain files in the folder of snapshots."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            states = (entry.stat(follow_symlinks=False) for entry in entries)
            return sum(state.st_size for state in states if stat.S_ISREG(state.st_mode))
        return 0

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

    @contextlib.contextmanager
    def receiving(self, name: str) -> Iterator[Upload]:
        """Give a file to write an upload to; its name is final once it is complete.

        No file that is there is replaced: a second one of a name gets a number. An error leaves
        nothing. Raises ValueError for a name that is not a snapshot's and while another upload
        arrives, and OSError.
        """
        checked = upload_name(name)
        if not self._uploading.acquire(blocking=False):
            raise ValueError("Another snapshot is being uploaded. Send this one after it.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, part = tempfile.mkstemp(dir=self.folder, prefix=_PART, suffix=".part")
            self._part = Path(part)
            try:
                with open(number, "wb") as file:
                    upload = Upload(file, checked)
                    yield upload
                upload.name = self._reserved(checked)
                try:
                    os.replace(part, self.folder / upload.name)
                except OSError:  # `close` has deleted it
                    os.unlink(self.folder / upload.name)
                    raise
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        finally:
            self._part = None
            self._uploading.release()

    def _reserved(self, name: str) -> str:
        """Make an empty file of this name, or with the first number that is free; return its name.

        A hard link would do without the empty file, but not every file system has them.
        """
        stem, _, ending = name.rpartition(".")
        for number in itertools.count(1):
            tried = name if number == 1 else f"{stem}-{number}.{ending}"
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.folder / tried, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                return tried
        raise AssertionError("numbers do not end")

    def _remove_leftovers(self) -> None:
        """Remove what uploads have left that a server's end has cut off, a day later."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{_PART}*.part"):
                if time.time() - path.lstat().st_mtime > PART_AGE_S:
                    path.unlink()

    def close(self) -> None:
        """End what is being opened, and delete what an upload has left."""
        part = self._part
        if part is not None:
            part.unlink(missing_ok=True)
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


def too_large(size: int, kept: int = 0) -> str | None:
    """Return why a file of this size is refused when `kept` bytes are stored; None if accepted."""
    if size > SIZE_LIMIT:
        return (
            f"The file must have at most {SIZE_LIMIT:,} bytes, got {size:,}. "
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
