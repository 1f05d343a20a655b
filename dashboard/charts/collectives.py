"""Measured collectives as a Plotly figure by size on log axes, and as a table; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stepscope.common.formatting import format_bytes, format_short_time
from stepscope.distributed.communication import rate_text
from trainer.collectives.results import spread_of

# After Okabe and Ito, as charts/lab.py: told apart with any color vision, on light and dark.
COLORS = {
    "all_reduce": "#1a80c4",
    "all_gather": "#d55e00",
    "reduce_scatter": "#009e73",
    "broadcast": "#b07d00",
    "all_to_all": "#c0609a",
}
SYMBOLS = {
    "all_reduce": "circle",
    "all_gather": "square",
    "reduce_scatter": "diamond",
    "broadcast": "triangle-up",
    "all_to_all": "x",
}
SHOWN = {
    "Bus bandwidth": ("bus", 1e-9, "GB/s"),
    "Algorithm bandwidth": ("algorithm", 1e-9, "GB/s"),
    "Time": ("seconds", 1e6, "µs"),
}
"""What the chart may show: key of a row, factor to the axis's unit, unit."""
SIZES_NAMED = 6
"""Labels of the axis of sizes at most: a phone has room for so many."""
Document = Mapping[str, Any]


def figure(shown: str, document: Document, other: Document | None = None) -> dict[str, Any] | None:
    """Return the chart of one measurement, and of another as dotted lines; None without results."""
    key, factor, unit = SHOWN[shown]
    traces = _traces(document, key, factor, "solid")
    if not traces:
        return None
    if other is not None:
        traces += _traces(other, key, factor, "dot")
    link = (document.get("machine") or {}).get("link")
    most = link["bytes_per_s"] / 1e9 if key == "bus" and link else None
    sizes = sorted({size for trace in traces for size in trace["x"]})
    return {"data": traces, "layout": _layout(f"{shown}, {unit}", sizes, most, link)}


def _traces(document: Document, key: str, factor: float, dash: str) -> list[dict[str, Any]]:
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
            "line": {"color": COLORS.get(operation, "#7a8490"), "dash": dash, "width": 2},
            "marker": {"symbol": SYMBOLS.get(operation, "circle"), "size": 7},
        }
        for operation, found in rows.items()
    ]


def _hover(row: Document) -> str:
    return (
        f"<b>{escape(str(row['operation']))}</b>, {format_bytes(row['bytes'])}<br>"
        f"{format_short_time(row['seconds'])}<br>"
        f"algorithm {rate_text(row['algorithm'])}<br>bus {rate_text(row['bus'])}"
    )


def _layout(
    title: str, sizes: list[int], most: float | None, link: Document | None
) -> dict[str, Any]:
    # Back from the last one, so that it is named.
    sizes = sizes[:: -math.ceil(len(sizes) / SIZES_NAMED)][::-1]
    found: dict[str, Any] = {
        "height": 420,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 44},
        "hovermode": "closest",
        "dragmode": False,
        "legend": {"orientation": "h", "y": -0.22, "x": 0, "font": {"size": 13}},
        "xaxis": {
            "type": "log",
            "title": {"text": "Size of the whole array", "font": {"size": 13}},
            "tickvals": sizes,
            "ticktext": [format_bytes(size).replace(".00", "").replace(".0", "") for size in sizes],
            "fixedrange": True,
        },
        "yaxis": {
            "type": "log",
            "title": {"text": title, "font": {"size": 13}},
            "automargin": True,
            "tickformat": ",~r",
            "dtick": 1,
            "fixedrange": True,
        },
    }
    if most is not None and link is not None:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": most, "y1": most}
        found["shapes"] = [line | {"line": {"color": "#7a8490", "dash": "dash", "width": 2}}]
    return found


def table_html(document: Document) -> str:
    """Return the results as a table: a row a result, numbers to the right."""
    heads = ("Operation", "Size", "Time", "Slowest / fastest", "Algorithm", "Bus")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(_row(row) for row in document["rows"])
    # On a phone it is wider than the page: scrolled by touch, or by keys once it has the focus.
    return (
        '<div class="scrolled-table" tabindex="0" role="region" aria-label="Results">'
        f'<table class="lab-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _row(row: Document) -> str:
    start = f'<th scope="row">{escape(str(row["operation"]))}</th>'
    size = f"<td>{format_bytes(row['bytes'])}</td>"
    if "reason" in row:
        return f'<tr>{start}{size}<td colspan="4">{escape(str(row["reason"]))}</td></tr>'
    cells: Sequence[str] = (
        format_short_time(row["seconds"]),
        _spread(row),
        rate_text(row["algorithm"]),
        rate_text(row["bus"]),
    )
    return f"<tr>{start}{size}" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _spread(row: Document) -> str:
    spread = spread_of(row)
    return "–" if spread is None else f"{spread:.1f}"
