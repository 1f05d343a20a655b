"""Shared parts of the Plotly figures. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

# After Okabe and Ito: distinguishable with any color vision, contrast of at least 3:1 on the light
# and the dark background.
BLUE, ORANGE, GREEN = "#1a80c4", "#d55e00", "#009e73"
AMBER, GRAY = "#b07d00", "#7a8490"
PINK = "#cc79a7"
FIXED: Json = {"fixedrange": True, "zeroline": False}


def plain(text: str) -> str:
    """Escape a text for Plotly, which interprets some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shortened(text: str, length: int) -> str:
    """Return at most `length` characters of a text, escaped."""
    return plain(text if len(text) <= length else f"{text[: length - 1]}…")


def unit_of(most: float) -> tuple[str, float]:
    """Return the unit for values up to `most` bytes, and its size in bytes."""
    sizes = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 1024.0}
    return next(((name, size) for name, size in sizes.items() if most >= size), ("B", 1.0))


def layout(height: int, **others: Any) -> Json:
    """Return the layout of a chart with a legend above it."""
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 13}}
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 34, "b": 44},
        "hovermode": "closest",
        "dragmode": False,
        "legend": legend | {"itemclick": False, "itemdoubleclick": False},
    } | others


def title(text: str) -> Json:
    return {"text": text, "font": {"size": 13}}


def rows_axis(labels: Sequence[str]) -> Json:
    """Return a vertical axis with one row per label, the first at the top."""
    return FIXED | {
        "tickvals": list(range(len(labels))),
        "ticktext": list(labels),
        "range": [len(labels) - 0.5, -0.5],
        "automargin": True,
        "tickfont": {"size": 13},
        "showgrid": False,
    }
