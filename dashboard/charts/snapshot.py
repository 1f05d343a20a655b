"""A memory snapshot as Plotly figures, which Streamlit never redraws, and table rows. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dashboard.charts import figures
from dashboard.charts.figures import Json
from dashboard.charts.profile import PHASE_COLORS
from stepscope.common.formatting import format_bytes
from stepscope.memory.snapshots.segments import ACTIVE, AWAITING, FREE, DeviceSegments, SegmentRow
from stepscope.memory.snapshots.stacks import own_frame, short
from stepscope.memory.snapshots.summary import (
    AllocationSite,
    SnapshotDiff,
    SnapshotSummary,
    by_module,
)
from stepscope.memory.snapshots.timeline import MemoryTimeline, StackUsage

MIB = 2.0**20
BANDS = (  # Colors of the bands for light and dark, the largest band first.
    *(figures.BLUE, figures.ORANGE, figures.GREEN, figures.PINK, figures.AMBER),
    *("#7c6be4", "#2aa5c9", "#a3455a", "#8a9a2c", "#7d5a44"),
)
BEFORE_COLOR, REST_COLOR = "#6b7280", "#a9b1bc"
STATE_COLORS = {ACTIVE: figures.BLUE, AWAITING: figures.PINK, FREE: "#b9c0c9"}
STATE_WORDS = {ACTIVE: "in use", AWAITING: "freed, another stream still uses it", FREE: "free"}
MAX_LABEL_CHARS = 52  # of a legend entry
ROW_PX, MAP_ROWS = 20, 24  # height of a segment in the map, and number of segments
HISTORY_PX = 380
PHASE = "phase="  # prefix of the labels in Stepscope's own recordings
MIN_NAME_DISTANCE = 0.07  # between two label names, as a fraction of the width
MAX_FRAMES = 30  # of a stack in a table cell


def where(frames: tuple[str, ...]) -> str:
    """Return the innermost line of user code in a stack.

    >>> where(("/v/site-packages/torch/nn/functional.py:5 in linear", "/me/net.py:7 in forward"))
    'net.py:7 in forward'
    """
    own = own_frame(frames)
    return "No stack recorded" if own is None else short(own)


def _where_and_inner(frames: tuple[str, ...]) -> str:
    """Return the line of user code and the innermost frame: one line may have many stacks."""
    own = where(frames)
    inner = short(frames[0]) if frames else own
    return own if inner == own else f"{own} · {inner.rpartition(' in ')[0]}"


def history_figure(summary: SnapshotSummary, history: MemoryTimeline) -> Json:
    """Return live bytes as stacked bands over the actions of the allocator."""
    x = list(history.columns)
    unit, factor = figures.unit_of(max(history.live, default=0))
    bands: list[tuple[str, str, tuple[int, ...]]] = []
    if any(history.before):
        bands.append(("Allocated before the recording", BEFORE_COLOR, history.before))
    for place, held in enumerate(history.bands):
        label = figures.shortened(_where_and_inner(summary.frames(held.stack)), MAX_LABEL_CHARS)
        bands.append((label, BANDS[place % len(BANDS)], held.live))
    if any(history.rest):
        bands.append(("Everything else", REST_COLOR, history.rest))
    traces = [
        _line(x, label, live, unit, factor, color)
        | {
            "stackgroup": "live",
            "fillcolor": color,
            "line": {"width": 0.5, "color": color, "shape": "hv"},
        }
        for label, color, live in bands
    ]
    if history.reserved is not None and any(history.reserved):
        traces.append(_line(x, "Reserved", history.reserved, unit, factor, figures.GRAY))
    return {"data": traces, "layout": _history_layout(summary, history, unit)}


def map_figure(summary: SnapshotSummary, memory: DeviceSegments) -> Json:
    """Return the most fragmented segments as rows of blocks."""
    rows = memory.rows[:MAP_ROWS]
    unit, factor = figures.unit_of(max((row.size for row in rows), default=0))
    traces = [
        trace
        for state in (ACTIVE, AWAITING, FREE)
        if (trace := _blocks(summary, rows, state, unit, factor)) is not None
    ]
    found = figures.layout(
        90 + ROW_PX * len(rows),
        barmode="overlay",
        xaxis=figures.FIXED | {"ticksuffix": f" {unit}"},
        yaxis=figures.rows_axis([_row_label(row) for row in rows]),
    )
    return {"data": traces, "layout": found}


def stack_rows(summary: SnapshotSummary, held: Iterable[AllocationSite | StackUsage]) -> list[Json]:
    """Return one row per stack with live memory; sizes in MiB."""
    return [
        {
            "Size": one.size / MIB,
            "Blocks": one.count,
            "Allocated at": where(summary.frames(one.stack)),
            "Module": summary.module(one.stack) or "",
            "Stack": _stack(summary.frames(one.stack)),
        }
        for one in held
    ]


def module_rows(summary: SnapshotSummary, device: int) -> list[Json]:
    """Return one row per module of a device; allocations without a module share a row."""
    return [
        {
            "Module": one.module or "No module in the stack",
            "Size": one.size / MIB,
            "Blocks": one.count,
        }
        for one in by_module(summary, device)
    ]


def change_rows(changes: SnapshotDiff) -> list[Json]:
    """Return one row per stack whose live memory differs between the snapshots."""
    return [
        {
            "Change": one.more / MIB,
            "Before": one.before / MIB,
            "After": one.after / MIB,
            "Blocks": one.count_after - one.count_before,
            "Allocated at": where(one.frames),
            "Module": one.module or "",
            "Stack": _stack(one.frames),
        }
        for one in changes.changes
    ]


def _stack(frames: tuple[str, ...]) -> list[str]:
    return [short(frame) for frame in frames[:MAX_FRAMES]]


def _line(
    x: list[Any], label: str, values: tuple[int, ...], unit: str, factor: float, color: str
) -> Json:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": x,
        "y": [round(value / factor, 3) for value in values],
        "line": {"width": 1.5, "color": color, "dash": "dash", "shape": "hv"},
        "hovertemplate": f"%{{y:.3~f}} {unit}<extra>{label}</extra>",
    }


def _history_layout(summary: SnapshotSummary, history: MemoryTimeline, unit: str) -> Json:
    x = history.columns
    shapes = [figures.line("x", x[column], figures.ORANGE, "solid") for column in history.ooms]
    notes = [_note(x[column], "out of memory") for column in history.ooms[:3]]
    named: set[int] = set()
    after = 0.0
    for span in history.spans:
        name = summary.labels[span.label].removeprefix(PHASE)
        last = x[min(span.last + 1, len(x) - 1)]
        color = PHASE_COLORS.get(name, figures.GRAY)
        shapes.append(figures.band("x", x[span.first], last, 1.005, 1.025, fillcolor=color))
        if span.label not in named and span.first >= after:
            named.add(span.label)
            after = span.first + MIN_NAME_DISTANCE * len(x)
            notes.append(_note(x[span.first], figures.plain(name)))
    return figures.layout(
        HISTORY_PX,
        dragmode="zoom",
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.2, "font": {"size": 12}, "itemclick": False},
        shapes=shapes,
        annotations=notes,
        xaxis={"title": figures.title("Actions of the allocator"), "showgrid": False},
        yaxis={"ticksuffix": f" {unit}", "rangemode": "tozero", "automargin": True},
    )


def _note(x: Any, text: str) -> Json:
    place = {
        "x": x,
        "y": 1.03,
        "xref": "x",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
    }
    return place | {"text": text, "showarrow": False, "font": {"size": 11}}


def _blocks(
    summary: SnapshotSummary, rows: tuple[SegmentRow, ...], state: int, unit: str, factor: float
) -> Json | None:
    """Return the blocks of one state as bars at their offsets; None without blocks."""
    base, size, place, text = [], [], [], []
    for number, row in enumerate(rows):
        start = 0
        for part in row.parts:
            if part.state == state:
                base.append(round(start / factor, 4))
                size.append(round(part.size / factor, 4))
                place.append(number)
                frames = summary.frames(part.stack)
                at = f"<br>{figures.plain(where(frames))}" if frames else ""
                text.append(format_bytes(part.size) + at)
            start += part.size
    if not base:
        return None
    return {
        "type": "bar",
        "orientation": "h",
        "width": 0.75,
        "name": STATE_WORDS[state],
        "base": base,
        "x": size,
        "y": place,
        "text": text,
        "textposition": "none",
        "marker": {
            "color": STATE_COLORS[state],
            "line": {"width": 0.5, "color": "rgba(127,127,127,0.6)"},
        },
        "hovertemplate": f"%{{text}}<br>at %{{base:.2f}} {unit}<extra>{STATE_WORDS[state]}</extra>",
    }


def _row_label(row: SegmentRow) -> str:
    pool = f", pool {row.pool}" if row.pool else ""
    stream = f", stream {row.stream}" if row.stream else ""
    return f"{format_bytes(row.size)}, {format_bytes(row.split)} split{stream}{pool}"
