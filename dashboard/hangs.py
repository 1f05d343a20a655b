"""Why a job of several ranks makes no step, as the pages show it while it hangs.

All tabs poll twice a second. The folder is looked at every LOOK_S for all of them together, and the
ranks' files are read only where there are any: 0.1 ms a rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.diagnosis.hang_job import Hang
from stepscope.diagnosis.hang_reading import hang_of
from stepscope.run import RunInfo

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often a run is looked at."""
KEPT = 64
"""Runs of which the answer is kept."""


class Hangs:
    """One a server; `of` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Path, tuple[float, Hang | None]] = OrderedDict()
        self._told: set[Path] = set()

    def of(self, run: RunInfo) -> Hang | None:
        """Return why a live run makes no step; None where it makes steps or nobody can know."""
        if not run.status.live or run.run_json.get("world_size", 1) == 1:
            return None
        now = self._clock()
        with self._lock:
            looked_at, found = self._known.get(run.folder, (-LOOK_S, None))
            if now - looked_at < LOOK_S and run.folder in self._known:
                return found
        try:
            found = hang_of(run)
        except OSError:
            found = None  # the folder is just being removed
        except Exception:  # what is in a folder may come from anybody; the page needs its charts
            found = None
            if self._is_news(run):
                log.warning("%s: why it makes no step cannot be said", run.id, exc_info=True)
        with self._lock:
            self._known[run.folder] = now, found
            self._known.move_to_end(run.folder)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found

    def _is_news(self, run: RunInfo) -> bool:
        with self._lock:
            is_new = run.folder not in self._told
            self._told.add(run.folder)
        return is_new


def as_verdict(hang: Hang | None) -> dict[str, Any] | None:
    """Return the line above the tiles; None without a hang."""
    if hang is None:
        return None
    return {"kind": "hang", "text": hang.text, "words": " ".join([hang.next, *hang.evidence])}
