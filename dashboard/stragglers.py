"""Who is slow in a job, and what its collectives cost: one look every few seconds for all tabs.

A look reads a few frames of every rank's store: 2 ms a rank, 0.1 s for 64. So while a run is live a
thread of its own looks, and a poll takes what was found last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stepscope.distributed.communication import communication_text
from stepscope.distributed.stragglers.detect import StragglerVerdict
from stepscope.distributed.stragglers.reader import in_job, judged_run
from stepscope.run import RunInfo
from stepscope.store import StoreError

log = logging.getLogger(__name__)

EVERY_S = 3.0
REST = 20
"""A look is not repeated before so many times of what it took: 5 % of a core at most."""
KEPT = 16
"""Runs of which the last look is kept."""

Start = Callable[[Callable[[], None]], None]
T = TypeVar("T")


@dataclass(slots=True)
class _StragglerCheck:
    next: float = 0.0
    """On a monotonic clock."""
    found: StragglerVerdict | None = None
    communication: str | None = None
    under_way: bool = False
    is_final: bool = False
    told: set[str] = field(default_factory=set)
    """What failed in a way that nobody expected: the log has it once."""


def _in_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="stepscope-stragglers", daemon=True).start()


class Stragglers:
    """One a server; `of` may be called from any thread. `start` runs a look aside."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, start: Start = _in_thread
    ) -> None:
        self._clock = clock
        self._start = start
        self._lock = threading.Lock()
        self._looks: dict[str, _StragglerCheck] = {}

    def of(self, run: RunInfo) -> StragglerVerdict | None:
        """Return what the last look at a job found; None for a process by itself, and at first.

        A run that has ended is looked at once, at once.
        """
        look = self._looked(run)
        return None if look is None else look.found

    def communication_of(self, run: RunInfo) -> str | None:
        """Return what the last look said of the collectives' cost; None where nothing is known."""
        look = self._looked(run)
        return None if look is None else look.communication

    def _looked(self, run: RunInfo) -> _StragglerCheck | None:
        if not in_job(run.run_json):
            return None
        live, now = run.status.live, self._clock()
        with self._lock:
            look = self._entry(str(run.folder))
            if look.under_way or look.is_final or (live and now < look.next):
                return look
            look.under_way = True
        if live:
            self._start(lambda: self._look(look, run))
        else:
            self._look(look, run)
        return look

    def _look(self, look: _StragglerCheck, run: RunInfo) -> None:
        began = self._clock()
        found = _tried(look, run, judged_run, look.found, "the ranks cannot be compared")
        said = _tried(
            look, run, communication_text, look.communication, "the cost of collectives is unknown"
        )
        now = self._clock()
        with self._lock:
            look.found, look.communication = found, said
            look.under_way, look.is_final = False, not run.status.live
            look.next = now + max(EVERY_S, REST * (now - began))

    def _entry(self, key: str) -> _StragglerCheck:
        look = self._looks.pop(key, None) or _StragglerCheck()
        self._looks[key] = look
        if len(self._looks) > KEPT:
            self._looks.pop(next(iter(self._looks)))
        return look


def _tried(
    look: _StragglerCheck, run: RunInfo, find: Callable[[RunInfo], T], last: T, otherwise: str
) -> T:
    """Return what is found, or what was found last where that fails."""
    try:
        return find(run)
    except (StoreError, OSError) as error:
        log.warning("%s: %s: %s", run.id, otherwise, error)
    except Exception:  # what is in a folder may come from anybody; the other ranks are shown
        if otherwise not in look.told:
            log.warning("%s: %s", run.id, otherwise, exc_info=True)
        look.told.add(otherwise)
    return last
