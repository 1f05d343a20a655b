"""Answers of `/api/ranks` as JSON values; `dashboard/live_chart/ranks_data.js` is the client."""

from __future__ import annotations

import math
from typing import Any

from dashboard.ranks.job_ranks import JobRanks
from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.stragglers.detect import StragglerVerdict
from stepscope.run import RunInfo
from stepscope.run.rank_info import now_of

Json = dict[str, Any]


def ranks_answer(job: JobRanks | None, run: RunInfo, metric: str, axis: str, verdict: Json) -> Json:
    """Return table, verdict and one heatmap: of `metric` if recorded, else of the first one.

    Without `ranks` while the job has not been read.
    """
    shown = {"run": run.id, "live": run.status.live, "now": _now(run), "axis": axis}
    if job is None:
        return shown
    heat = job.heat[axis]
    drawn = metric if metric in heat.cells else next(iter(heat.cells), None)
    strips = {"metrics": list(heat.cells), "metric": drawn, "width": heat.width}
    return shown | job.table | verdict | strips | {"cells": heat.cells.get(drawn or "", "")}


def _now(run: RunInfo) -> float:
    until = None if run.status.live else run.ended
    seconds = (until if until is not None else now_of(run.run_json)) - run.created
    return round(seconds, 1) if math.isfinite(seconds) else 0.0


def rank_verdict(straggler: StragglerVerdict | None, hang: Hang | None) -> Json | None:
    """Return `kind`, `ranks`, `text` and `next` of a verdict; a hang hides a straggler.

    The kind "none" has no ranks; its text is the reason. Returns None before the first analysis.
    """
    found = hang or straggler
    if found is None:
        return None
    kind = "hang" if isinstance(found, Hang) else found.kind.value
    return {"kind": kind, "ranks": list(found.ranks), "text": found.text, "next": found.next}
