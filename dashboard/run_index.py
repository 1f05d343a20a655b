"""The list of runs, updated by reading only what may have changed.

All tabs read it twice a second, and every millisecond of that is taken from a training thread in
this process: a folder is listed again only after a change, an ended run is read once and after an
edit, and of many live runs an update reads those that were read longest ago.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.common.files import modified_ns
from stepscope.run import (
    RUN_JSON,
    STALE_S,
    RunError,
    RunInfo,
    RunStatus,
    is_own,
    is_run_id,
    read_run,
)
from stepscope.run.metadata import NOTES_JSON

log = logging.getLogger(__name__)

MAX_LISTED = 200  # The newest by name; live runs are listed beyond it.
MAX_SEARCHED = 2000  # The newest by name, among which live runs are found: 0.3 ms each on NFS.
MAX_READ = 80  # Known runs that an update reads again (0.1 ms each), in turn.
MAX_CHECKED = 20  # Ended runs checked by an update (0.01 ms each): another server may rename them.
NAMES = ("name", "script")  # Entries of run.json that the list shows.
SETTLED_S = 2.0  # Age of a trusted modification time: file systems have ticks of up to a second.


@dataclass(frozen=True, slots=True)
class RunList:
    """The runs at one moment, live ones first, then newest first; `version` is its hash."""

    runs: tuple[RunInfo, ...] = ()
    version: str = ""


@dataclass(slots=True)
class _Entry:
    """One folder; `modified` is the time of its last change in ns, 0 without a run.json."""

    modified: int
    run: RunInfo | None
    final: bool
    looked: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        return self.run is not None and self.run.status.live


class RunIndex:
    """The runs in one or several folders; the first folder with an id has the run. Thread-safe."""

    def __init__(self, *folders: Path) -> None:
        self._folders = [_FolderIndex(folder) for folder in folders]
        self._lock = threading.Lock()
        self._listing = RunList()
        self._looked = -float("inf")

    def fresh(self) -> RunList:
        with self._lock:
            return self._update()

    def recent(self, max_age_s: float = 1.0) -> RunList:
        """Return the runs, at most `max_age_s` old unless another thread updates. Never blocks."""
        if time.monotonic() - self._looked >= max_age_s and self._lock.acquire(blocking=False):
            try:
                return self._update()
            finally:
                self._lock.release()
        return self._listing

    def forget(self, run_id: str) -> None:
        with self._lock:
            for folder in self._folders:
                folder.entries.pop(run_id, None)

    def _update(self) -> RunList:
        found: dict[str, RunInfo] = {}
        for folder in self._folders:
            for run in folder.runs():
                found.setdefault(run.id, run)
        runs = tuple(sorted(found.values(), key=lambda run: (not run.status.live, -run.created)))
        # Properties that the list shows and that may change while a run lives.
        shown = [(run.id, run.status.value, *map(run.run_json.get, NAMES)) for run in runs]
        self._listing = RunList(runs, f"{zlib.crc32(repr(shown).encode()):x}")
        self._looked = time.monotonic()
        return self._listing


class _FolderIndex:
    """The runs in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modified = -1
        self._names: list[str] = []
        self.entries: dict[str, _Entry] = {}

    def runs(self) -> list[RunInfo]:
        """Return the listed runs, the newest name first."""
        began = time.monotonic()
        self._list_names()
        listed: dict[str, None] = {}
        for name in self._names:
            if len(listed) >= MAX_LISTED:
                break
            entry = self.entries.get(name)
            if entry is None or entry.run is None:
                entry = self.entries[name] = _read(self._folder / name, entry)
            if entry.run is not None:
                listed[name] = None
        listed |= dict.fromkeys(name for name, entry in self.entries.items() if entry.live)
        due = sorted(listed, key=lambda name: self.entries[name].looked)
        ended = [name for name in due if self.entries[name].final][:MAX_CHECKED]
        for name in [name for name in due if not self.entries[name].final][:MAX_READ] + ended:
            if self.entries[name].looked < began:
                self.entries[name] = _read(self._folder / name, self.entries[name])
        return [run for name in listed if (run := self.entries[name].run) is not None]

    def _list_names(self) -> None:
        """List the folder again after a change, or while its modification time is too recent."""
        try:
            modified = os.stat(self._folder).st_mtime_ns
            if modified == self._modified:
                return
            names = sorted(filter(is_run_id, os.listdir(self._folder)), reverse=True)
        except OSError:  # missing or unreadable: there are no runs
            self._modified, names = -1, []
        else:
            self._modified = modified if is_settled(modified) else -1
        before, known, self._names = set(self._names), set(names), names
        # A folder may have been replaced by another of its name.
        self.entries = {
            name: entry
            for name, entry in self.entries.items()
            if name in known and (entry.live or entry.modified == _modified(self._folder / name))
        }
        # Live runs beyond the newest: only a process that runs rewrites its run.json.
        for name in names[MAX_LISTED:MAX_SEARCHED]:
            run_json = f"{self._folder}/{name}/{RUN_JSON}"
            if name not in before and time.time() - modified_ns(run_json) / 1e9 < STALE_S:
                self.entries[name] = _read(self._folder / name, None)


def _modified(folder: Path) -> int:
    """Return the time of the last change of a run or its notes in ns, 0 without a run.json."""
    modified = modified_ns(f"{folder}/{RUN_JSON}")
    return modified and max(modified, modified_ns(f"{folder}/{NOTES_JSON}"))


def _read(folder: Path, before: _Entry | None) -> _Entry:
    modified = _modified(folder)
    if modified == 0:
        return _Entry(0, None, False)  # a run about to begin, or another folder
    if before is not None and before.modified == modified:
        # An unreadable or ended run, or a crashed one of a mirror, changes with its files only.
        known = before.run
        if known is None or before.final or ("mirror" in known.run_json and not known.status.live):
            before.looked = time.monotonic()
            return before
    try:
        run = read_run(folder)
    except Exception as error:  # one untrusted folder must not hide all others
        expected = isinstance(error, RunError)
        text = error if expected else folder.name
        log.warning("run not listed: %s", text, exc_info=not expected)
        return _Entry(modified, None, False)
    return _Entry(modified, run, is_final(run) and is_settled(modified))


def is_final(run: RunInfo) -> bool:
    """Return True if the status of a run cannot change."""
    # A run of another host without a heartbeat looks crashed, and may recover.
    return not run.status.live and (run.status is not RunStatus.CRASHED or is_own(run))


def is_settled(modified_ns: int) -> bool:
    """Return True if a later change must give another modification time."""
    return abs(time.time() - modified_ns / 1e9) > SETTLED_S  # a clock may have been set
