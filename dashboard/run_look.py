"""What is slow to find out about a job, looked up in a thread for all tabs together.

All tabs poll twice a second. To judge a job reads the files of every rank: 2 ms a rank, 0.1 s for
64. So while a run is live a thread looks, and a poll takes what was found last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stepscope.distributed.stragglers.reader import in_job
from stepscope.run import RunInfo
from stepscope.store import StoreError

log = logging.getLogger(__name__)

EVERY_S = 2.0
REST = 20  # A look is not repeated before so many times of what it took: 5 % of a core at most.
KEPT = 64  # Runs of which the last look is kept.

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def in_thread(look: Callable[[], None]) -> None:
    """Call `look` in a thread of its own."""
    threading.Thread(target=look, name="stepscope-look", daemon=True).start()


def recent(entries: OrderedDict[K, T], key: K, make: Callable[[], T], limit: int) -> T:
    """Return the entry of a key, made where there is none; keep the `limit` last used ones."""
    if key not in entries:
        entries[key] = make()
    entries.move_to_end(key)
    while len(entries) > limit:
        entries.popitem(last=False)
    return entries[key]


@dataclass(slots=True)
class _Look(Generic[T]):
    found: T | None = None
    next: float = 0.0  # On a monotonic clock; infinite after the look at an ended run.
    under_way: bool = False
    logged: bool = False


class RunLook(Generic[T]):
    """The last answers of `find` for jobs of several ranks; `of` may be called from any thread.

    `problem` is logged where `find` fails; what was found last stays. `start` runs a look aside.
    """

    def __init__(
        self,
        find: Callable[[RunInfo], T | None],
        problem: str,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] = in_thread,
        *,
        keep: bool = True,
    ) -> None:
        self._find = find
        self._problem = problem
        self._clock = clock
        self._start = start
        self._keep = keep  # what was found last stays while a look fails
        self._lock = threading.Lock()
        self._looks: OrderedDict[str, _Look[T]] = OrderedDict()

    def of(self, run: RunInfo) -> T | None:
        """Return what the last look found; None for a process by itself, and at first.

        A run that has ended is looked at once, and the caller waits for it.
        """
        if not in_job(run.run_json):
            return None
        with self._lock:
            look = recent(self._looks, str(run.folder), _Look[T], KEPT)
            if look.under_way or self._clock() < look.next:
                return look.found
            look.under_way = True
        if run.status.live:
            self._start(lambda: self._look(look, run))
        else:
            self._look(look, run)
        return look.found

    def _look(self, look: _Look[T], run: RunInfo) -> None:
        began, found = self._clock(), look.found if self._keep else None
        try:
            found = self._find(run)
        except (StoreError, OSError) as error:
            log.debug("%s: %s: %s", run.id, self._problem, error)
        except Exception:  # what is in a folder may come from anybody; the page needs its charts
            if not look.logged:
                log.warning("%s: %s", run.id, self._problem, exc_info=True)
            look.logged = True
        now = self._clock()
        pause_s = max(EVERY_S, REST * (now - began)) if run.status.live else float("inf")
        with self._lock:
            look.found, look.under_way, look.next = found, False, now + pause_s
