"""The state of a run as JSON values: status, progress, and warnings about the recording. No I/O."""

from __future__ import annotations

import time
from typing import Any

from dashboard.charts.run_view import run_kind
from stepscope.run import RunInfo, RunKind, RunStatus

STALE_S = 3.0  # age of the heartbeat from which the page warns; it is written every second


def state(run: RunInfo) -> dict[str, Any]:
    """Return the state of a run: the part of an answer that needs no store."""
    run_json = run.run_json
    progress = {name: run_json.get(name) for name in ("step", "total_steps", "epoch", "epochs")}
    progress["epoch"] = progress["epoch"] or None  # counted from 1; 0: not counted
    return {
        "run": run.id,
        "status": run.status,
        "reason": run.reason or _waiting(run),
        "warnings": warnings(run),
        "now": round((run.ended or time.time()) - run.created, 3),
        "progress": progress,
        "series": {},
        "events": [],
    }


def warnings(run: RunInfo) -> list[str]:
    """Return the warnings about the recording itself, one sentence each."""
    run_json, age_s = run.run_json, run.heartbeat_age_s
    found = [str(run_json["problem"])] if run_json.get("problem") else []
    dropped = run_json.get("dropped") or 0
    if dropped > 0:
        were = "step or event was" if dropped == 1 else "steps or events were"
        why = run_json.get("dropped_reason") or (
            "the disk was too slow and the memory buffer is full, or the store cannot hold them"
        )
        found.append(f"{dropped:,} {were} not recorded: {why}. Training was not delayed.")
    if run.status.live and age_s > STALE_S:
        found.append(
            f"No update for {age_s:,.0f} s. The run has not ended, but its folder does not "
            "change: the disk may be full or read-only, or the process blocked. Values may be "
            "stale."
        )
    return found


def _waiting(run: RunInfo) -> str | None:
    if run.status is RunStatus.PENDING and run_kind(run) in (RunKind.WATCH, RunKind.INIT):
        return "The script has not finished its first optimizer step yet."
    return None
