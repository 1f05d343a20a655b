"""Read a run folder's record of failed allocations, and diagnose it with the run's setup."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from stepscope.host.usage import kills_since
from stepscope.memory.oom.classify import OomFinding, diagnose
from stepscope.memory.oom.recommendations import Allowed
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord, OomReport, read_report
from stepscope.run import RunInfo, RunStatus
from stepscope.run_setup import setup_of

MAX_SILENCE_S = 300.0  # Maximum age of a heartbeat: later kills may be another process's.


@dataclass(frozen=True, slots=True)
class OomAnalysis:
    """A run's report with the finding about its last failed allocation."""

    report: OomReport
    finding: OomFinding

    @property
    def sentence(self) -> str:
        """The cause and its evidence, in one line."""
        return f"{self.finding.cause}: {self.finding.text}"


def diagnose_run(run: RunInfo, rank: int = 0, allowed: Allowed | None = None) -> OomAnalysis | None:
    """Return the analysis of a rank's failed allocations; None without failures.

    Raises OSError, and ValueError with the name of a malformed file.
    """
    report = read_report(run.folder, rank) or _killed(run)
    if report is None:
        return None
    return OomAnalysis(report, diagnose(report.last, setup_of(run.run_json), allowed=allowed))


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
        ts=float(beat),
        memory=MemoryKind.HOST,
        step=step if type(step) is int else 0,
        host=HostMemory(kills=kills),
    )
    return OomReport(last=record, ended=True)
