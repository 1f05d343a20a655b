"""Bus bandwidth of collectives over the message size, and all results as table rows. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dashboard.charts import figures
from dashboard.charts.figures import Json
from stepscope.common.formatting import format_bytes
from stepscope.distributed.collective_metrics import rate_text
from trainer.collectives.measurement import spread_of

STYLES = {  # Color and symbol of each collective.
    "all_reduce": (figures.BLUE, "circle"),
    "all_gather": (figures.ORANGE, "square"),
    "reduce_scatter": (figures.GREEN, "diamond"),
    "broadcast": (figures.AMBER, "triangle-up"),
    "all_to_all": ("#c0609a", "x"),
}
MAX_SIZE_LABELS = 6  # as many as fit on a phone
LOG = {"type": "log", "fixedrange": True}
Document = Mapping[str, Any]


def figure(document: Document, other: Document | None = None) -> Json | None:
    """Return the chart of a measurement, `other` as dotted lines; None without results."""
    traces = _traces(document, "solid")
    if not traces:
        return None
    traces += [] if other is None else _traces(other, "dot")
    # At most MAX_SIZE_LABELS, counted from the largest size, which always has a label.
    sizes = sorted({size for trace in traces for size in trace["x"]})
    sizes = sizes[:: -math.ceil(len(sizes) / MAX_SIZE_LABELS)][::-1]
    names = [format_bytes(size).replace(".00", "").replace(".0", "") for size in sizes]
    x_axis = {
        "title": figures.title("Size of the whole array"),
        "tickvals": sizes,
        "ticktext": names,
    }
    y_axis = {"title": figures.title("Bus bandwidth, GB/s"), "automargin": True, "dtick": 1}
    found = figures.layout(420, xaxis=LOG | x_axis, yaxis=LOG | y_axis | {"tickformat": ",~r"})
    link = (document.get("machine") or {}).get("link")
    if link:
        found["shapes"] = [figures.line("y", link["bytes_per_s"] / 1e9, figures.GRAY)]
    return {"data": traces, "layout": found}


def _traces(document: Document, dash: str) -> list[Json]:
    rows: dict[str, list[Document]] = {}
    for row in document["rows"]:
        if "bus" in row:
            rows.setdefault(row["operation"], []).append(row)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": figures.plain(operation) + (" (compared)" if dash == "dot" else ""),
            "x": [row["bytes"] for row in found],
            "y": [row["bus"] / 1e9 for row in found],
            "text": [f"{format_bytes(row['bytes'])}: {rate_text(row['bus'])}" for row in found],
            "hovertemplate": "%{text}",
            "line": {"color": color, "dash": dash, "width": 2},
            "marker": {"symbol": symbol, "size": 7},
        }
        for operation, found in rows.items()
        for color, symbol in [STYLES.get(operation, (figures.GRAY, "circle"))]
    ]


def table_rows(document: Document) -> list[Json]:
    """Return one row per result; times in µs, bandwidths in GB/s."""
    rows = []
    for row in document["rows"]:
        named = {"Operation": row["operation"], "Size": format_bytes(row["bytes"])}
        if "reason" in row:
            rows.append({**named, "Reason": str(row["reason"])})
            continue
        measured = {
            "Time": row["seconds"] * 1e6,
            "Slowest / fastest": spread_of(row),
            "Algorithm": row["algorithm"] * 1e-9,
            "Bus": row["bus"] * 1e-9,
        }
        rows.append(named | measured)
    return rows
