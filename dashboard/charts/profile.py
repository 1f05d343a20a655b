"""A profile as table rows and Plotly figures: phases of a step, and a flame graph. No I/O."""

from __future__ import annotations

import re

from dashboard.charts.figures import BLUE, GRAY, GREEN, ORANGE, PINK, Json, plain
from stepscope.common.formatting import format_short_time
from stepscope.profiling.phase_ranges import OTHER
from stepscope.profiling.summary import ProfileSummary
from stepscope.profiling.trace_stats import FlameGraph

MS, MIB = 1000.0, 2.0**20
PHASE_COLORS = {
    "data": ORANGE,  # as perf/data_wait in the step time chart
    "forward": BLUE,
    "backward": PINK,
    "optimizer": GREEN,
    OTHER: GRAY,
}
KINDS = {  # Color of each kind of function in the flame graph.
    "Python": "#8fbfe3",
    "module": "#7cc8ad",
    "built-in function": "#b9c0c9",
    "operator": "#e9a77a",
}
MAX_NODES = 4000  # sent to the browser: those with the most time
OUTER_FRACTION = 0.97
_OPERATOR = re.compile(r"[\w.]+(::|Backward\d|$)")


def rows(summary: ProfileSummary) -> list[Json]:
    """Return one row per operator, summed over the steps: ms and MiB, of CUDA if recorded."""
    columns: dict[str, tuple[str, float]] = {}
    if summary.cuda:
        columns |= {"CUDA self": ("cuda_self_us", MS), "CUDA total": ("cuda_total_us", MS)}
    columns |= {"CPU self": ("cpu_self_us", MS), "CPU total": ("cpu_total_us", MS)}
    if summary.cuda or any(operator.cuda_memory for operator in summary.operators):
        columns["CUDA memory"] = ("cuda_memory", MIB)
    columns["CPU memory"] = ("cpu_memory", MIB)
    return [
        {"Operator": operator.name, "Calls": operator.calls}
        | {title: getattr(operator, field) / unit for title, (field, unit) in columns.items()}
        for operator in summary.operators
    ]


def phase_figure(summary: ProfileSummary) -> Json:
    """Return a stacked bar of the phases of a step per timeline: training thread and GPU."""
    steps = max(1, summary.last - summary.first + 1)
    bars = {"GPU": summary.phases.cuda_us} if summary.cuda else {}
    bars["Training thread"] = summary.phases.cpu_us  # the last bar is drawn on top
    traces = []
    for name, color in PHASE_COLORS.items():
        shares = [times[name] / (sum(times.values()) or 1.0) for times in bars.values()]
        each = [format_short_time(times[name] / steps / 1e6) for times in bars.values()]
        texts = [f"{name} {share:.1%} · {text}" for share, text in zip(shares, each, strict=True)]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name if len(bars) > 1 else texts[0],
                "x": shares,
                "y": list(bars),
                "text": texts,
                "textangle": 0,
                "insidetextanchor": "start",
                "hovertemplate": "%{text} per step<extra></extra>",
                "marker": {"color": color},
            }
        )
    layout = {
        "height": 110 + 34 * len(bars),
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "barmode": "stack",
        "dragmode": False,
        "legend": {"orientation": "h", "traceorder": "normal", "y": 0, "yanchor": "top"},
        "xaxis": {"visible": False, "range": [0, 1], "fixedrange": True},
        "yaxis": {"automargin": True, "fixedrange": True},
    }
    return {"data": traces, "layout": layout}


def flame_figure(flame: FlameGraph) -> Json:
    """Return an icicle of the MAX_NODES largest functions, opened where the time is spent."""
    order = sorted(range(len(flame.parent)), key=lambda node: -flame.total_us[node])
    largest, size = set(order[:MAX_NODES]), dict[int, float]()
    for node, parent in enumerate(flame.parent):
        if node in largest and (parent < 0 or parent in size):
            size[node] = 0.0
    for node in reversed(size):  # Plotly draws nothing if children exceed their parent
        size[node] = max(size[node], flame.total_us[node])
        if (parent := flame.parent[node]) >= 0:
            size[parent] += size[node]
    whole = sum(size[node] for node in size if flame.parent[node] < 0) or 1.0
    outer = [node for node in size if size[node] >= OUTER_FRACTION * whole]
    names = {node: flame.names[flame.name[node]] for node in size}
    trace = {
        "type": "icicle",
        "ids": [str(node) for node in size],
        "parents": [str(flame.parent[node]) if flame.parent[node] >= 0 else "" for node in size],
        "labels": [plain(name.removeprefix("nn.Module: ")) for name in names.values()],
        "values": list(size.values()),
        "branchvalues": "total",
        "text": [
            f"{format_short_time(flame.total_us[node] / 1e6)} "
            f"({flame.total_us[node] / whole:.1%}) in {flame.calls[node]:,} calls"
            for node in size
        ],
        "textinfo": "label",
        "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "tiling": {"orientation": "v"},
        "marker": {"colors": [KINDS[kind_of(name)] for name in names.values()]},
        "maxdepth": 24,
    }
    layout = {
        "height": 540,
        # The top margin shows the path to the function.
        "margin": {"l": 4, "r": 4, "t": 28, "b": 4},
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    if outer:
        trace["level"] = str(outer[-1])
    return {"data": [trace], "layout": layout}


def kind_of(name: str) -> str:
    """Return the kind of a function in a stack, a key of KINDS.

    >>> [kind_of(name) for name in ("train.py(9): main", "aten::mm", "nn.Module: Net_0")]
    ['Python', 'operator', 'module']
    """
    if name.startswith("nn.Module: "):
        return "module"
    if name.startswith("<built-in"):
        return "built-in function"
    is_python = re.search(r"\.py\(\d+\): ", name)
    return "operator" if not is_python and _OPERATOR.match(name) else "Python"
