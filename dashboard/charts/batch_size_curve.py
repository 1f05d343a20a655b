"""Memory and throughput by batch size as one Plotly figure; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# After Okabe and Ito, as in charts/lab.py.
MEMORY_COLOR, RATE_COLOR, LIMIT_COLOR = "#1a80c4", "#b07d00", "#d55e00"
HEIGHT_PX = 320


def batch_figure(curve: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the figure of `trainer.memory_estimate --find-batch-size`; None without points.

    Left what is needed with margin and what is free, right the measured throughput.
    """
    points: Sequence[Mapping[str, Any]] = curve.get("points") or ()
    if not points:
        return None
    bytes_of, unit = _unit(points)
    sizes = [point["batch_size"] for point in points]
    measured = [point for point in points if point["samples_per_sec"] is not None]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "needed, with margin",
            "x": sizes,
            "y": [point["needed_bytes"] / bytes_of for point in points],
            "line": {"color": MEMORY_COLOR},
            "hovertemplate": f"batch %{{x:,}}: %{{y:.3g}} {unit} needed<extra></extra>",
        }
    ]
    if measured:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "samples/s, measured",
                "x": [point["batch_size"] for point in measured],
                "y": [point["samples_per_sec"] for point in measured],
                "yaxis": "y2",
                "line": {"color": RATE_COLOR, "dash": "dot"},
                "marker": {"symbol": "diamond"},
                "hovertemplate": "batch %{x:,}: %{y:,.0f} samples/s<extra></extra>",
            }
        )
    return {"data": traces, "layout": _layout(curve, bool(measured), bytes_of, unit)}


def _unit(points: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The largest unit of which the largest point has one at least."""
    highest = max(point["needed_bytes"] for point in points)
    return next((unit for unit in UNITS if highest >= unit[0]), UNITS[-1])


def _layout(curve: Mapping[str, Any], has_rates: bool, bytes_of: int, unit: str) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "height": HEIGHT_PX,
        "margin": {"l": 60, "r": 60 if has_rates else 20, "t": 30, "b": 45},
        "xaxis": {"title": {"text": "batch size"}, "type": "log", "dtick": 0.30102999566398119},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
        "shapes": [],
        "annotations": [],
    }
    if has_rates:
        layout["yaxis2"] = {
            "title": {"text": "samples/s"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
        }
    free = curve.get("free_bytes")
    highest = max(point["needed_bytes"] for point in curve["points"])
    # Far above all points it would press them flat.
    if free is not None and free <= 4 * highest:
        layout["shapes"].append(_line("y", free / bytes_of, LIMIT_COLOR))
        layout["annotations"].append(
            _note(f"free: {free / bytes_of:.4g} {unit}", 1, free / bytes_of, "paper")
        )
    recommended = curve.get("recommended")
    if recommended is not None:
        layout["shapes"].append(_line("x", recommended, RATE_COLOR))
    return layout


def _line(axis: str, at: float, color: str) -> dict[str, Any]:
    """Return a line across the whole chart, at a place of an axis."""
    across = "x" if axis == "y" else "y"
    return {
        "type": "line",
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        f"{axis}0": at,
        f"{axis}1": at,
        "line": {"color": color, "dash": "dash"},
    }


def _note(text: str, x: float, y: float, xref: str) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": xref,
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
    }
