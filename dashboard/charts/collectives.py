"""Measured collectives as a Plotly figure over the message size, and as table rows. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dashboard.charts.figures import (
    AMBER,
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    Json,
    layout,
    line,
    plain,
    title,
)
from stepscope.common.formatting import format_bytes, format_short_time
from stepscope.distributed.collective_metrics import rate_text
from trainer.collectives.measurement import spread_of

STYLES = {
    "all_reduce": (BLUE, "circle"),
    "all_gather": (ORANGE, "square"),
    "reduce_scatter": (GREEN, "diamond"),
    "broadcast": (AMBER, "triangle-up"),
    "all_to_all": ("#c0609a", "x"),
}
"""Color and symbol of each collective."""
SHOWN = {
    "Bus bandwidth": ("bus", 1e-9, "GB/s"),
    "Algorithm bandwidth": ("algorithm", 1e-9, "GB/s"),
    "Time": ("seconds", 1e6, "µs"),
}
"""Quantities of the chart: key of a result row, factor to the axis's unit, unit."""
MAX_SIZE_LABELS = 6  # as many as fit on a phone
LOG = {"type": "log", "fixedrange": True}
Document = Mapping[str, Any]


def figure(shown: str, document: Document, other: Document | None = None) -> Json | None:
    """Return the chart of a measurement, `other` as dotted lines; None without results."""
    key, factor, unit = SHOWN[shown]
    traces = _traces(document, key, factor, "solid")
    if not traces:
        return None
    traces += [] if other is None else _traces(other, key, factor, "dot")
    link = (document.get("machine") or {}).get("link")
    most = link["bytes_per_s"] / 1e9 if key == "bus" and link else None
    sizes = sorted({size for trace in traces for size in trace["x"]})
    return {"data": traces, "layout": _layout(f"{shown}, {unit}", sizes, most)}


def _traces(document: Document, key: str, factor: float, dash: str) -> list[Json]:
    rows: dict[str, list[Document]] = {}
    for row in document["rows"]:
        if key in row:
            rows.setdefault(row["operation"], []).append(row)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": operation + (" (compared)" if dash == "dot" else ""),
            "x": [row["bytes"] for row in found],
            "y": [row[key] * factor for row in found],
            "text": [_hover(row) for row in found],
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"color": color, "dash": dash, "width": 2},
            "marker": {"symbol": symbol, "size": 7},
        }
        for operation, found in rows.items()
        for color, symbol in [STYLES.get(operation, (GRAY, "circle"))]
    ]


def _hover(row: Document) -> str:
    return (
        f"<b>{plain(str(row['operation']))}</b>, {format_bytes(row['bytes'])}<br>"
        f"{format_short_time(row['seconds'])}<br>"
        f"algorithm {rate_text(row['algorithm'])}<br>bus {rate_text(row['bus'])}"
    )


def _layout(text: str, sizes: list[int], most: float | None) -> Json:
    # Counted from the largest size, which always has a label.
    sizes = sizes[:: -math.ceil(len(sizes) / MAX_SIZE_LABELS)][::-1]
    names = [format_bytes(size).replace(".00", "").replace(".0", "") for size in sizes]
    x_axis = {"title": title("Size of the whole array"), "tickvals": sizes, "ticktext": names}
    y_axis = {"title": title(text), "automargin": True, "tickformat": ",~r", "dtick": 1}
    found = layout(420, xaxis=LOG | x_axis, yaxis=LOG | y_axis)
    found["legend"] |= {"itemclick": "toggle", "itemdoubleclick": "toggleothers"}
    return found if most is None else found | {"shapes": [line("y", most, GRAY)]}


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
