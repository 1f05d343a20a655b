"""The list of runs, updated by reading only what may have changed.

All tabs read it twice a second, and every millisecond of that is taken from a training thread in
this process: a folder is listed again only after a change, an ended run is read once.
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

MAX_LISTED = 200  # The newest by name.
SETTLED_S = 2.0  # Age of a trusted modification time: file systems have ticks of up to a second.


@dataclass(frozen=True, slots=True)
class RunList:
    """The runs at one moment, live ones first, then newest first; `version` is its hash."""

    runs: tuple[RunInfo, ...] = ()
    version: str = ""


@dataclass(slots=True)
class _Entry:
    """One folder; `modified` is the modification time of its run.json in ns, 0 without one."""

    modified: int
    run: RunInfo | None
    final: bool


class RunIndex:
    """The runs in a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modified = -1
        self._names: list[str] = []
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._listing = RunList()
        self._looked = -float("inf")

    def fresh(self) -> RunList:
        """Return the current runs."""
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

    def _update(self) -> RunList:
        runs = tuple(sorted(self._runs(), key=lambda run: (not run.status.live, -run.created)))
        # Properties that the list shows and that may change while a run lives.
        state = repr(
            [
                (
                    run.id,
                    run.status.value,
                    run.run_json.get("name"),
                    run.run_json.get("script") is None,
                )
                for run in runs
            ]
        )
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
        """List the folder again after a change, or while its modification time is too recent."""
        try:
            modified = os.stat(self._folder).st_mtime_ns
            if modified == self._modified:
                return
            names = sorted(filter(is_run_id, os.listdir(self._folder)), reverse=True)
        except OSError:  # missing or unreadable: there are no runs
            self._modified, names = -1, []
        else:
            self._modified = modified if _settled(modified) else -1
        self._names = names
        # A folder may have been replaced by another of its name.
        known = set(names)
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if name in known and entry.modified == _modified(self._folder / name / RUN_JSON)
        }


def _read(folder: Path, before: _Entry | None) -> _Entry:
    modified = _modified(folder / RUN_JSON)
    if modified == 0:
        return _Entry(0, None, False)  # a run about to begin, or another folder
    if before is not None and before.run is None and before.modified == modified:
        return before
    try:
        run = read_run(folder)
    except Exception as error:  # one untrusted folder must not hide all others
        expected = isinstance(error, RunError)
        text = error if expected else folder.name
        log.warning("run not listed: %s", text, exc_info=not expected)
        return _Entry(modified, None, False)
    # A run of another host without a heartbeat looks crashed, and may recover.
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
