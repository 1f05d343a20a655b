"""Why a job of several ranks makes no step, as the pages show it while it hangs.

All tabs poll twice a second. The folder is looked at every LOOK_S for all of them together. While
ranks hang their files are read: 1 to 2 ms a rank, so a thread of its own looks, and a poll takes
what was found last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.distributed.hangs.job_state import Hang
from stepscope.run import RunInfo

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often a run is looked at."""
REST = 20
"""A look is not repeated before so many times of what it took: 5 % of a core at most."""
KEPT = 64
"""Runs of which the answer is kept."""

Start = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class _HangCheck:
    next: float = 0.0
    """On a monotonic clock."""
    found: Hang | None = None
    under_way: bool = False
    told: bool = False
    """An error that nobody expected stands in the log, which has it once."""


def _in_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="stepscope-hangs", daemon=True).start()


class Hangs:
    """One a server; `of` may be called from any thread. `start` runs a look aside."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, start: Start = _in_thread
    ) -> None:
        self._clock = clock
        self._start = start
        self._lock = threading.Lock()
        self._looks: OrderedDict[Path, _HangCheck] = OrderedDict()

    def of(self, run: RunInfo) -> Hang | None:
        """Return why a live run made no step at the last look; None where it makes steps, where
        nobody can know, and at first.
        """
        if not run.status.live or run.run_json.get("world_size", 1) == 1:
            return None
        with self._lock:
            look = self._entry(run.folder)
            if look.under_way or self._clock() < look.next:
                return look.found
            look.under_way = True
        self._start(lambda: self._look(look, run))
        return look.found

    def _look(self, look: _HangCheck, run: RunInfo) -> None:
        began = self._clock()
        found = None
        try:
            found = hang_of(run)
        except OSError:
            pass  # the folder is just being removed
        except Exception:  # what is in a folder may come from anybody; the page needs its charts
            if not look.told:
                log.warning("%s: why it makes no step cannot be said", run.id, exc_info=True)
            look.told = True
        finally:
            now = self._clock()
            with self._lock:
                look.found, look.under_way = found, False
                look.next = now + max(LOOK_S, REST * (now - began))

    def _entry(self, folder: Path) -> _HangCheck:
        look = self._looks.setdefault(folder, _HangCheck())
        self._looks.move_to_end(folder)
        while len(self._looks) > KEPT:
            self._looks.popitem(last=False)
        return look


def as_verdict(hang: Hang | None) -> dict[str, Any] | None:
    """Return the line above the tiles; None without a hang."""
    if hang is None:
        return None
    return {"kind": "hang", "text": hang.text, "words": hang.next}
