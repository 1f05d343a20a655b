"""Memory and throughput over the batch size as one Plotly figure. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dashboard.charts.figures import AMBER, BLUE, ORANGE, Json, layout, line, note, unit_of

HEIGHT_PX = 320


def batch_figure(curve: Mapping[str, Any]) -> Json | None:
    """Return the figure of `trainer.memory_estimate --find-batch-size`; None without points.

    Left axis: required memory with margin, and free memory. Right axis: measured throughput.
    """
    points = curve.get("points") or ()
    if not points:
        return None
    highest = max(point["needed_bytes"] for point in points)
    unit, factor = unit_of(highest)
    needed = _line("needed, with margin", points, "needed_bytes", factor, BLUE)
    needed["hovertemplate"] = f"batch %{{x:,}}: %{{y:.3g}} {unit} needed<extra></extra>"
    traces = [needed]
    found = layout(
        HEIGHT_PX,
        xaxis={"title": {"text": "batch size"}, "type": "log", "dtick": math.log10(2)},
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
        shapes=[],
        annotations=[],
    )
    measured = [point for point in points if point["samples_per_sec"] is not None]
    if measured:
        rate = _line("samples/s, measured", measured, "samples_per_sec", 1.0, AMBER)
        rate["hovertemplate"] = "batch %{x:,}: %{y:,.0f} samples/s<extra></extra>"
        traces.append(rate | {"yaxis": "y2", "marker": {"symbol": "diamond"}})
        right = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero"}
        found["yaxis2"] = {"title": {"text": "samples/s"}, **right}
    free = curve.get("free_bytes")
    # A line far above all points would flatten the curve.
    if free is not None and free <= 4 * highest:
        at = free / factor
        found["shapes"].append(line("y", at, ORANGE))
        text = f"free: {at:.4g} {unit}"
        found["annotations"].append(note(1, at, text, xref="paper", xanchor="right"))
    if curve.get("recommended") is not None:
        found["shapes"].append(line("x", curve["recommended"], AMBER))
    return {"data": traces, "layout": found}


def _line(name: str, points: Any, key: str, factor: float, color: str) -> Json:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [point["batch_size"] for point in points],
        "y": [point[key] / factor for point in points],
        "line": {"color": color},
    }
