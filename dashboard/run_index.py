"""The list of runs, kept current by looking only at what can have changed.

All tabs ask for it twice a second, and every millisecond of that is taken from a training thread in
this process: a folder is listed again only when its time of change moves, an ended run is never
read a second time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepscope.run import (
    RUN_JSON,
    RunError,
    RunInfo,
    RunStatus,
    is_run_id,
    read_only_reason,
    read_run,
)

log = logging.getLogger(__name__)

MAX_LISTED = 200  # Runs that are listed: the newest by name, and live ones that were once seen.
SETTLED_S = 2.0
"""Age from which a time of change is trusted: file systems count it in ticks of up to a second."""


@dataclass(frozen=True, slots=True)
class RunList:
    """The runs at one moment: live ones first, then newest first. `version` names this state."""

    runs: tuple[RunInfo, ...] = ()
    version: str = ""


@dataclass(slots=True)
class _Entry:
    """What is known of one folder; `modified` is the time of change of its run.json, 0: none."""

    modified: int
    run: RunInfo | None
    final: bool


class RunIndex:
    """The runs under a folder; every method may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modified = -1
        self._names: list[str] = []
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._listing = RunList()
        self._looked = -float("inf")

    def fresh(self) -> RunList:
        """Return the runs as of now."""
        with self._lock:
            return self._look()

    def recent(self, max_age_s: float = 1.0) -> RunList:
        """Return the runs as of at most `max_age_s` ago; waits for nobody who is looking."""
        if time.monotonic() - self._looked >= max_age_s and self._lock.acquire(blocking=False):
            try:
                return self._look()
            finally:
                self._lock.release()
        return self._listing

    def _look(self) -> RunList:
        runs = tuple(sorted(self._runs(), key=lambda run: (not run.status.live, -run.created)))
        state = repr([_shown(run) for run in runs])
        self._listing = RunList(runs, f"{zlib.crc32(state.encode()):x}")
        self._looked = time.monotonic()
        return self._listing

    def _runs(self) -> Iterator[RunInfo]:
        self._list_names()
        listed = 0
        for name in self._names:
            entry = self._entries.get(name)
            once_live = entry is not None and entry.run is not None and entry.run.status.live
            if listed >= MAX_LISTED and not once_live:
                continue
            if entry is None or not entry.final:
                entry = self._entries[name] = _read(self._folder / name, entry)
            if entry.run is not None:
                listed += 1
                yield entry.run

    def _list_names(self) -> None:
        """List the folder again if it has changed, or so lately that a change may not show."""
        try:
            modified = os.stat(self._folder).st_mtime_ns
            if modified == self._modified:
                return
            names = sorted(filter(is_run_id, os.listdir(self._folder)), reverse=True)
        except OSError:  # not made yet, or not ours to read: there are no runs
            self._modified, names = -1, []
        else:
            self._modified = modified if _settled(modified) else -1
        self._names = names
        # A name may stand for another run now.
        self._entries = {
            name: entry
            for name, entry in ((name, self._entries.get(name)) for name in names)
            if entry is not None and entry.modified == _modified(self._folder / name / RUN_JSON)
        }


def _shown(run: RunInfo) -> tuple[object, ...]:
    """Return what the list shows of a run and may change while it lives."""
    return run.id, run.status.value, run.run_json.get("name"), run.run_json.get("script") is None


def _read(folder: Path, before: _Entry | None) -> _Entry:
    modified = _modified(folder / RUN_JSON)
    if modified == 0:
        return _Entry(0, None, False)  # a run about to begin, or something else of that name
    if before is not None and before.run is None and before.modified == modified:
        return before
    try:
        run = read_run(folder)
    except RunError as error:
        log.warning("left out of the list: %s", error)
        return _Entry(modified, None, False)
    except Exception:  # one folder, which anybody may have put there, must not hide all others
        log.warning("left out of the list: %s", folder.name, exc_info=True)
        return _Entry(modified, None, False)
    # Silent for a while, a run of another host looks crashed and may come back.
    final = not run.status.live and (
        run.status is not RunStatus.CRASHED or read_only_reason(run) is None
    )
    return _Entry(modified, run, final and _settled(modified))


def _modified(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _settled(modified_ns: int) -> bool:
    return abs(time.time() - modified_ns / 1e9) > SETTLED_S  # a clock may have been set
