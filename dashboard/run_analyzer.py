"""Slow findings about runs, computed in a thread and shared by all tabs.

A finding reads the files of every rank, 1 to 10 ms each; a poll takes the latest finding.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stepscope.run import RunInfo
from stepscope.store import StoreError

log = logging.getLogger(__name__)

EVERY_S = 2.0
REST = 20  # Pause in multiples of the duration of a search: at most 5% of a core.
MAX_CACHED = 16  # Runs whose latest finding is kept.

T = TypeVar("T")


def _in_thread(search: Callable[[], None]) -> None:
    threading.Thread(target=search, name="stepscope-analysis", daemon=True).start()


@dataclass(slots=True)
class _Entry(Generic[T]):
    found: T | None = None
    next: float = 0.0  # On a monotonic clock.
    under_way: bool = False
    logged: bool = False


class RunAnalyzer(Generic[T]):
    """The latest results of `find` by run, each kept for at least EVERY_S. Thread-safe.

    None after a failure, which is logged as `problem`. `start` runs a search.
    """

    def __init__(
        self,
        find: Callable[[RunInfo], T | None],
        problem: str,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        self._find = find
        self._problem = problem
        self._clock = clock
        self._start = start
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()

    def of(self, run: RunInfo) -> T | None:
        """Return the latest result; None at first.

        The caller waits for the search of a run that has ended.
        """
        with self._lock:
            entry = self._entries.setdefault(str(run.folder), _Entry[T]())
            self._entries.move_to_end(str(run.folder))
            if len(self._entries) > MAX_CACHED:
                self._entries.popitem(last=False)
            if entry.under_way or self._clock() < entry.next:
                return entry.found
            entry.under_way = True
        if run.status.live:
            self._start(lambda: self._search(entry, run))
        else:
            self._search(entry, run)
        return entry.found

    def _search(self, entry: _Entry[T], run: RunInfo) -> None:
        began = self._clock()
        found = None
        try:
            found = self._find(run)
        except (StoreError, OSError) as error:
            log.debug("%s: %s: %s", run.id, self._problem, error)
        except Exception:  # an untrusted folder; the page still needs its charts
            if not entry.logged:
                log.warning("%s: %s", run.id, self._problem, exc_info=True)
            entry.logged = True
        now = self._clock()
        with self._lock:
            entry.found = found
            entry.under_way = False
            entry.next = now + max(EVERY_S, REST * (now - began))
