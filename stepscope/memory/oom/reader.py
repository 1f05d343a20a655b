"""Read a run folder's record of failed allocations, and classify it with the run's other data."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.bottleneck.step_window import setup_of
from stepscope.host.usage import kills_since
from stepscope.memory.growth_detector import EVENT as GROWTH
from stepscope.memory.oom.classify import OomVerdict, judge
from stepscope.memory.oom.recommendations import Allowed
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord, OomReport, read_report
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import wall_offset_of
from stepscope.store import StoreError, StoreReader
from stepscope.store.reader import EVERY

MAX_SILENCE_S = 300.0  # Maximum age of a heartbeat: later kills may be another process's.


@dataclass(frozen=True, slots=True)
class OomAnalysis:
    """A run's report with the verdict on its last failed allocation."""

    report: OomReport
    verdict: OomVerdict

    @property
    def sentence(self) -> str:
        """The cause and its evidence, in one line."""
        return f"{self.verdict.case}: {self.verdict.text}"


def judged(run: RunInfo, rank: int = 0, allowed: Allowed | None = None) -> OomAnalysis | None:
    """Return a folder rank's failed allocations with a verdict; None without failures.

    Raises OSError, and ValueError with the name of a malformed file.
    """
    report = read_report(run.folder, rank) or _killed(run)
    if report is None:
        return None
    growth = growth_told(run.folder, rank)
    verdict = judge(report.last, setup_of(run.run_json), growth=growth, allowed=allowed)
    return OomAnalysis(report, verdict)


def growth_told(folder: Path, rank: int = 0) -> Mapping[str, Any] | None:
    """Return the data of a run's last stored event about growth of allocated memory."""
    try:
        with StoreReader(folder, rank) as reader:
            growth = [event.data for event in reader.events(limit=EVERY, kind=GROWTH)]
    except StoreError:
        return None
    return next((data for data in reversed(growth) if data.get("where") == "allocated"), None)


def _killed(run: RunInfo) -> OomReport | None:
    """Return a report for a crashed run of this host if the kernel killed a process, or None."""
    run_json, beat = run.run_json, run.run_json.get("heartbeat")
    if run.status is not RunStatus.CRASHED or run_json.get("host") != socket.gethostname():
        return None
    if not isinstance(beat, int | float) or not 0 <= time.time() - beat <= MAX_SILENCE_S:
        return None
    kills, step = kills_since(run_json.get("oom_kills")), run_json.get("step")
    if not kills:
        return None
    record = OomRecord(
        ts=float(beat) - wall_offset_of(run_json),
        memory=MemoryKind.HOST,
        step=step if type(step) is int else 0,
        host=HostMemory(kills=kills),
    )
    return OomReport(first=record, last=record, ended=True)
