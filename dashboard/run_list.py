"""The one list of runs of a server; a scan reads only the folders that have changed.

All tabs read the list twice a second, and every millisecond of that is taken from a training thread
of this process: an ended run is read once, and again after its folder has changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dashboard.run_rows import RunRow, row_of
from stepscope.common.files import modified_ns
from stepscope.run import RunError, RunInfo, check_readable, is_run_id, read_run
from stepscope.run.retention import folder_size
from stepscope.store import STORE_NAME

log = logging.getLogger(__name__)

MAX_LISTED = 200  # The newest by name; `RunList.rows` has all.
NAMES = ("name", "script")  # Entries of run.json that the list shows.
SETTLED_S = 2.0  # Age of a trusted modification time: file systems have ticks of up to a second.


@dataclass(frozen=True, slots=True)
class Listing:
    """The runs at one moment, live ones first, then newest first; `version` is its hash."""

    runs: tuple[RunInfo, ...] = ()
    version: str = ""


@dataclass(slots=True)
class _Entry:
    """One folder: `stamp` is the time of its last change in ns, 0 to read it at the next scan."""

    stamp: int = 0
    run: RunInfo | None = None
    row: RunRow | None = None
    problem: str | None = None

    @property
    def live(self) -> bool:
        return self.run is not None and self.run.status.live


@dataclass(slots=True)
class _Root:
    """A folder of runs, and what has been read of them by name, the newest first."""

    path: Path
    is_mirror: bool
    entries: dict[str, _Entry] = field(default_factory=dict)

    def scan(self, *, everything: bool) -> Iterator[_Entry]:
        """Yield the current entries: all, or the newest and those of known live runs."""
        try:
            names = sorted(filter(is_run_id, os.listdir(self.path)), reverse=True)
        except OSError:  # missing or unreadable: there are no runs
            names = []
        self.entries = {name: self.entries.get(name, _Entry()) for name in names}
        for index, (name, entry) in enumerate(self.entries.items()):
            if not everything and index >= MAX_LISTED and not entry.live:
                continue
            stamp = self._stamp(name)
            if entry.live or not stamp or stamp != entry.stamp:
                entry = self.entries[name] = _read(self.path / name, stamp, entry.problem)
            yield entry

    def _stamp(self, name: str) -> int:
        """Return the modification time of a folder, in which files are replaced or created."""
        stamp = modified_ns(f"{self.path}/{name}")
        if self.is_mirror:  # whose store grows in place
            stamp = max(stamp, modified_ns(f"{self.path}/{name}/{STORE_NAME}"))
        return stamp


def _read(folder: Path, stamp: int, known_problem: str | None) -> _Entry:
    entry = _Entry(stamp if is_settled(stamp) else 0)
    try:
        entry.run = read_run(folder)
    except RunError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return entry  # a run about to begin, or another folder
        entry.problem = str(error)
        if isinstance(error.__cause__, PermissionError):
            entry.stamp = 0  # a change of rights changes no modification time
    except Exception as error:  # noqa: BLE001 - one untrusted folder must not hide all others
        entry.problem = f"{folder.name}: cannot be read ({error!r:.200}). Delete the folder."
    if entry.problem is not None and entry.problem != known_problem:
        log.warning("run not listed: %s", entry.problem)
    return entry


class RunList:
    """The runs in one or several folders; the first folder with an id has the run. Thread-safe.

    `mirrors` are those of the folders that have the runs of another host.
    """

    def __init__(self, *folders: Path, mirrors: Collection[Path] = ()) -> None:
        self._roots = [_Root(folder, folder in mirrors) for folder in folders]
        self._lock = threading.Lock()
        self._listing = Listing()
        self._scanned = -float("inf")

    def fresh(self) -> Listing:
        with self._lock:
            return self._scan()

    def recent(self, max_age_s: float = 1.0) -> Listing:
        """Return the runs, at most `max_age_s` old unless another thread scans. Never blocks."""
        if time.monotonic() - self._scanned >= max_age_s and self._lock.acquire(blocking=False):
            try:
                return self._scan()
            finally:
                self._lock.release()
        return self._listing

    def rows(self) -> list[RunRow]:
        """Return the rows of all runs: live ones, then pinned ones, then the newest."""
        with self._lock:
            entries = [
                (root, entry) for root in self._roots for entry in root.scan(everything=True)
            ]
        found: dict[str, RunRow] = {}
        for root, entry in entries:
            row = _row(root, entry)
            if row is not None:
                found.setdefault(row.id, row)
        return sorted(found.values(), key=lambda row: (not row.live, not row.pinned, -row.created))

    def unreadable(self) -> list[str]:
        """Return why folders of runs, and runs of the last scan, cannot be read."""
        problems = []
        for root in self._roots:
            if not root.is_mirror:
                try:
                    check_readable(root.path)
                except RunError as error:
                    problems.append(str(error))
        with self._lock:
            entries = [entry for root in self._roots for entry in root.entries.values()]
        return problems + [entry.problem for entry in entries if entry.problem is not None]

    def _scan(self) -> Listing:
        found: dict[str, RunInfo] = {}
        for root in self._roots:
            for entry in root.scan(everything=False):
                if entry.run is not None:
                    found.setdefault(entry.run.id, entry.run)
        runs = tuple(sorted(found.values(), key=lambda run: (not run.status.live, -run.created)))
        # Properties that the list shows and that may change while a run lives.
        shown = [(run.id, run.status.value, *map(run.run_json.get, NAMES)) for run in runs]
        self._listing = Listing(runs, f"{zlib.crc32(repr(shown).encode()):x}")
        self._scanned = time.monotonic()
        return self._listing


def _row(root: _Root, entry: _Entry) -> RunRow | None:
    """Return the row of an entry, made once after each read; None for an unreadable run."""
    if entry.row is None and entry.run is not None:
        # Of a remote run only a part of its files is here.
        size = None if root.is_mirror else folder_size(entry.run.folder)
        try:
            entry.row = row_of(entry.run, size)
        except Exception:  # one untrusted folder must not hide all others
            log.warning("run not listed: %s", entry.run.id, exc_info=True)
            entry.problem = f"{entry.run.id}: has values that cannot be shown. Delete the folder."
            entry.run = None
    return entry.row


def is_settled(modified: int) -> bool:
    """Return True if a later change must give another modification time (ns)."""
    return abs(time.time() - modified / 1e9) > SETTLED_S  # a clock may have been set
