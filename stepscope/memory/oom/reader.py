"""Reads what a run folder has of failed allocations, and judges it with what else the run knows."""

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
"""Longest time from a run's last heartbeat to a look at the kernel's counter that still says
something of its end: later, any other process may have been the one that was killed."""


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
    run: RunInfo,
    rank: int = 0,
    events: Iterable[EventRow] = (),
    allowed: Allowed | None = None,
) -> OomAnalysis | None:
    """Return what is known of a run's failed allocations; None where there were none.

    `rank` is the number in the folder. Raises ValueError for a file that is no report, with its
    name, and OSError.
    """
    report = read_report(run.folder, rank) or _killed(run)
    if report is None:
        return None
    growth = growth_among(events)
    verdict = judge(report.last, setup_of(run.run_json), growth=growth, allowed=allowed)
    return OomAnalysis(report, verdict)


def read_report(folder: Path, rank: int = 0) -> OomReport | None:
    """Return a rank's report; None where it has none. Raises ValueError and OSError."""
    path = folder / oom_name(rank)
    try:
        data = read_regular_file(path, BYTES_LIMIT)
    except FileNotFoundError:
        return None
    try:
        return parse(data)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def growth_among(events: Iterable[EventRow]) -> Mapping[str, Any] | None:
    """Return the data of the last event that tells of growth of allocated memory."""
    told = [event.data for event in events if event.kind == GROWTH]
    return next((data for data in reversed(told) if data.get("where") == "allocated"), None)


def growth_told(folder: Path, rank: int = 0) -> Mapping[str, Any] | None:
    """Return the same of a run's store, None where it cannot be read."""
    try:
        with StoreReader(folder, rank) as reader:
            return growth_among(reader.events(limit=EVERY))
    except StoreError:
        return None


def _killed(run: RunInfo) -> OomReport | None:
    """Return a report of a run that is gone since the kernel has killed for lack of memory.

    The counter is this machine's, so nothing is said of runs of other hosts; and it is the
    present one, so nothing is said of runs that ended long ago.
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
