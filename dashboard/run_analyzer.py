"""Slow findings about runs, computed in a thread and shared by all tabs.

A finding reads the files of every rank, 1 to 10 ms each; a poll takes the latest finding.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dashboard.out_of_memory import out_of_memory_line
from stepscope.diagnosis.findings import read_rank, straggler_of
from stepscope.diagnosis.learning import NOT_FINITE
from stepscope.diagnosis.results import BottleneckDiagnosis, BottleneckKind, IsSettingAllowed
from stepscope.distributed.hangs.cases import Hang, hang_of
from stepscope.distributed.stragglers.detect import StragglerFinding, in_job
from stepscope.run import RunInfo, RunStatus
from stepscope.run_setup import Recommendation, setting_text
from stepscope.store import StoreError
from trainer.config import SETTINGS
from trainer.training.config_validation import TrainDevice, is_possible

Line = dict[str, Any]
"""A finding as JSON: kind, text, and a recommendation as `words` or as a `setting`."""


@dataclass(frozen=True, slots=True)
class RunFindings:
    """The page's diagnosis `line`, and why the ranks of a `job` wait."""

    line: Line | None
    job: Line | None = None


def find(run: RunInfo, devices: Sequence[TrainDevice]) -> RunFindings:
    """Return the findings about a run; `devices` are those of this machine. Raises StoreError."""
    config = run.run_json.get("config") or {}
    allowed = functools.partial(is_possible, config=config, devices=devices)
    if not in_job(run.run_json):
        return RunFindings(out_of_memory_line(run, devices) or _store_line(run, allowed))
    hang = hang_of(run) if run.status.live else None
    straggler = straggler_of(run)
    line = out_of_memory_line(run, devices) or _job_line(hang)
    if line is None and straggler is not None and straggler.next is not None:
        line = _job_line(straggler)
    return RunFindings(line or _store_line(run, allowed), _job_line(hang or straggler))


def _job_line(found: Hang | StragglerFinding | None) -> Line | None:
    if found is None:
        return None
    kind = "hang" if isinstance(found, Hang) else found.kind.value
    return {"kind": kind, "ranks": list(found.ranks), "text": found.text, "words": found.next}


def _store_line(run: RunInfo, allowed: IsSettingAllowed) -> Line | None:
    """Return what keeps a run from learning, or what costs its time. Raises StoreError."""
    rank = read_rank(run, 0)
    broken = rank.record.broken
    is_past = run.status.live and broken is not None and broken.recovered
    for found in rank.learning:
        # A failed run has a broken loss as its reason.
        if found.kind is not NOT_FINITE or not (is_past or run.status is RunStatus.FAILED):
            return _line(found.kind.value, found.text, found.next)
    return bottleneck_line(rank.verdicts(allowed)[0])


def bottleneck_line(found: BottleneckDiagnosis) -> Line | None:
    """Return a bottleneck with the sidebar's setting to try; None if no cause is known."""
    if not (found.kind.names_a_cause or found.kind is BottleneckKind.SIMULATED):
        return None
    return _line(found.kind.value, found.text, found.next)


def _line(kind: str, text: str, step: Recommendation | None) -> Line:
    line = {"kind": kind, "text": text}
    if step is None:
        return line
    if step.name is None:
        return line | {"words": step.text}
    setting = {
        "field": step.name,
        "value": step.value,
        "text": setting_text(step.name, step.value),
        "place": SETTINGS[step.name].group,
    }
    return line | {"setting": setting}


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
