"""What a profile shows: a row an operator, and for the browser the parts of a step and the stacks.

Pure.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stepscope.profiling.phase_ranges import OTHER, PHASES
from stepscope.profiling.summary import ProfileSummary

MS, MIB = 1000.0, 2.0**20
PHASE_COLORS = {
    "data": "orange",  # as the wait for data in the chart of step time
    "forward": "blue",
    "backward": "pink",
    "optimizer": "green",
    OTHER: "gray",
}


def rows(summary: ProfileSummary) -> list[dict[str, Any]]:
    """Return a row an operator: times in ms and memory in MiB, summed over the profiled steps."""
    found = []
    for operator in summary.operators:
        row: dict[str, Any] = {"Operator": operator.name, "Calls": operator.calls}
        if summary.cuda:
            row["CUDA self"] = operator.cuda_self_us / MS
            row["CUDA total"] = operator.cuda_total_us / MS
        row["CPU self"] = operator.cpu_self_us / MS
        row["CPU total"] = operator.cpu_total_us / MS
        if summary.cuda:
            row["CUDA memory"] = operator.cuda_memory / MIB
        row["CPU memory"] = operator.cpu_memory / MIB
        found.append(row)
    return found


def shown(summary: ProfileSummary) -> dict[str, Any]:
    """Return what the browser draws: `bars` of the parts of a step, and the `flame` graph."""
    steps = max(1, summary.last - summary.first + 1)
    bars = [{"label": "Training thread", "parts": _parts(summary.phases.cpu_us, steps)}]
    if summary.cuda:
        bars.append({"label": "GPU", "parts": _parts(summary.phases.cuda_us, steps)})
    return {"bars": bars, "flame": asdict(summary.flame), "steps": steps}


def _parts(times_us: dict[str, float], steps: int) -> list[dict[str, Any]]:
    """Return each part with its color, its share and its seconds a step."""
    whole = sum(times_us.values()) or 1.0
    return [
        {
            "name": name,
            "color": PHASE_COLORS[name],
            "share": times_us[name] / whole,
            "seconds": times_us[name] / steps / 1e6,
        }
        for name in (*PHASES, OTHER)
    ]
