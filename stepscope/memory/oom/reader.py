"""Read a run folder's record of failed allocations, and judge it with the run's other data."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.bottleneck.step_window import setup_of
from stepscope.common.files import read_regular_file
from stepscope.host.usage import kills_since
from stepscope.memory.growth_detector import EVENT as GROWTH
from stepscope.memory.oom.classify import OomVerdict, judge
from stepscope.memory.oom.recommendations import Allowed
from stepscope.memory.oom.record import (
    BYTES_LIMIT,
    HostMemory,
    MemoryKind,
    OomRecord,
    OomReport,
    oom_name,
    parse,
)
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import wall_offset_of
from stepscope.store import EventRow, StoreError, StoreReader
from stepscope.store.reader import EVERY

LOOKED_S = 300.0
"""Maximum time after a run's last heartbeat for which the kernel's counter of kills is used: later,
any other process may have been killed."""


@dataclass(frozen=True, slots=True)
class OomAnalysis:
    """A run's report with the verdict on its last failed allocation."""

    report: OomReport
    verdict: OomVerdict

    @property
    def sentence(self) -> str:
        """The case and what proves it, in one line."""
        return f"{self.verdict.case}: {self.verdict.text}"


def judged(
    run: RunInfo, rank: int = 0, events: Iterable[EventRow] = (), allowed: Allowed | None = None
) -> OomAnalysis | None:
    """Return a run's report of failed allocations with its verdict; None without failures.

    `rank` is the number in the folder. Raises OSError, and ValueError with the name of an invalid
    file.
    """
    report = read_report(run.folder, rank) or _killed(run)
    if report is None:
        return None
    growth = _last_growth(events)
    verdict = judge(report.last, setup_of(run.run_json), growth=growth, allowed=allowed)
    return OomAnalysis(report, verdict)


def read_report(folder: Path, rank: int = 0) -> OomReport | None:
    """Return a rank's report; None if it has none. Raises ValueError and OSError."""
    path = folder / oom_name(rank)
    try:
        return parse(read_regular_file(path, BYTES_LIMIT))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _last_growth(events: Iterable[EventRow]) -> Mapping[str, Any] | None:
    """Return the data of the last event about growth of allocated memory."""
    found = [event.data for event in events if event.kind == GROWTH]
    return next((data for data in reversed(found) if data.get("where") == "allocated"), None)


def growth_told(folder: Path, rank: int = 0) -> Mapping[str, Any] | None:
    """Return the data of the last event in a run's store about growth of allocated memory."""
    try:
        with StoreReader(folder, rank) as reader:
            return _last_growth(reader.events(limit=EVERY))
    except StoreError:
        return None


def _killed(run: RunInfo) -> OomReport | None:
    """Return a report of a run that crashed when the kernel killed a process for lack of memory.

    The counter is the present one of this machine: runs of other hosts and those that ended long
    ago have no report.
    """
    run_json = run.run_json
    if run.status is not RunStatus.CRASHED or run_json.get("host") != socket.gethostname():
        return None
    beat = run_json.get("heartbeat")
    if not isinstance(beat, int | float) or not 0 <= time.time() - beat <= LOOKED_S:
        return None
    kills = kills_since(run_json.get("oom_kills"))
    if not kills:
        return None
    step = run_json.get("step")
    record = OomRecord(
        ts=float(beat) - wall_offset_of(run_json),
        memory=MemoryKind.HOST,
        step=step if type(step) is int else 0,
        host=HostMemory(kills=kills),
    )
    return OomReport(first=record, last=record, ended=True)
