"""A profile as table rows, parts of a step as Markdown, and stacks as a Plotly icicle; pure."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from dashboard.charts.lab import plain
from stepscope.common.formatting import format_short_time
from stepscope.profiling.phase_ranges import OTHER, PHASES
from stepscope.profiling.summary import ProfileSummary
from stepscope.profiling.trace_stats import FlameGraph

MS, MIB = 1000.0, 2.0**20
PHASE_COLORS = {
    "data": "orange",  # as the wait for data in the chart of step time
    "forward": "blue",
    "backward": "violet",
    "optimizer": "green",
    OTHER: "gray",
}


class NodeKind(NamedTuple):
    """A kind of function in the icicle, with its color in Markdown and behind dark text."""

    name: str
    word: str
    color: str


KINDS = (
    NodeKind("Python", "blue", "#8fc1e3"),
    NodeKind("module", "green", "#7fcab0"),
    NodeKind("built-in function", "gray", "#b9c0c9"),
    NodeKind("operator", "orange", "#eba36b"),
)
PYTHON, MODULE, BUILT_IN, OPERATOR = KINDS
_PYTHON = re.compile(r"\.py\(\d+\): ")
_OPERATOR = re.compile(r"[\w.]+(::|Backward\d|$)")
MIN_SHARE = 1 / 2000
FLAME_PX, ROWS = 440, 22
"""Height of the icicle, and its rows of nodes; a click on a node shows those below."""


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


def parts_of_steps(summary: ProfileSummary) -> list[str]:
    """Return Markdown lines with each part's share and duration per step: one per device."""
    steps = max(1, summary.last - summary.first + 1)
    lines = [_parts("Training thread", summary.phases.cpu_us, steps)]
    if summary.cuda:
        lines.append(_parts("GPU", summary.phases.cuda_us, steps))
    return lines


def flame_figure(flame: FlameGraph) -> dict[str, Any]:
    """Return the stacks as an icicle, callers above callees; a click fills the width with a node.

    Nodes below MIN_SHARE of the profile are left out.
    """
    whole = sum(t for t, parent in zip(flame.total_us, flame.parent, strict=True) if parent < 0)
    room: dict[int, float] = {-1: whole}  # what the callees of each drawn node may still take
    drawn: list[int] = []
    values: list[float] = []
    for node, parent in enumerate(flame.parent):  # callers come first
        value = min(flame.total_us[node], room.get(parent, 0.0))
        if value <= MIN_SHARE * whole:
            continue
        room[parent] -= value
        room[node] = value
        drawn.append(node)
        values.append(value)
    names = [flame.names[flame.name[node]] for node in drawn]
    times = [flame.total_us[node] for node in drawn]
    return {
        "data": [
            {
                "type": "icicle",
                "ids": [str(node) for node in drawn],
                "labels": [plain(name.removeprefix("nn.Module: ")) for name in names],
                "parents": ["" if (at := flame.parent[node]) < 0 else str(at) for node in drawn],
                "values": values,
                "customdata": [
                    [plain(name), format_short_time(time / 1e6), f"{flame.calls[node]:,}"]
                    for node, name, time in zip(drawn, names, times, strict=True)
                ],
                "hovertemplate": "%{customdata[0]}<br>%{customdata[1]} (%{percentRoot}) in "
                "%{customdata[2]} calls<extra></extra>",
                "branchvalues": "total",
                "level": _first_level(flame, whole),
                "maxdepth": ROWS,
                "tiling": {"orientation": "v", "pad": 1},
                "textinfo": "label",
                "marker": {"colors": [kind_of(name).color for name in names]},
            }
        ],
        "layout": {"height": FLAME_PX, "margin": {"l": 0, "r": 0, "t": 24, "b": 0}},
    }


def _first_level(flame: FlameGraph, whole: float) -> str:
    """Return the id of the node to begin with, below callers that hold nearly all of the time."""
    largest: dict[int, int] = {}
    for node, parent in enumerate(flame.parent):
        if flame.total_us[node] >= flame.total_us[largest.setdefault(parent, node)]:
            largest[parent] = node
    chain = [-1]
    while (node := largest.get(chain[-1], -1)) >= 0 and flame.total_us[node] >= 0.97 * whole:
        chain.append(node)
    return str(chain[-2]) if len(chain) > 2 else ""


def kind_of(name: str) -> NodeKind:
    """Return whether a name is of an operator, a built-in, a module, or a Python function."""
    if name.startswith("nn.Module: "):
        return MODULE
    if name.startswith("<built-in"):
        return BUILT_IN
    return OPERATOR if not _PYTHON.search(name) and _OPERATOR.match(name) else PYTHON


def _parts(label: str, times_us: dict[str, float], steps: int) -> str:
    whole = sum(times_us.values()) or 1.0
    words = [
        f":{PHASE_COLORS[name]}[■] {name} {times_us[name] / whole:.0%} · "
        f"{format_short_time(times_us[name] / steps / 1e6)}"
        for name in (*PHASES, OTHER)
        if times_us[name] > 0
    ]
    return f"**{label}, by part of a step:** {', '.join(words)}"
