"""The charts of a job's collectives: bytes and time, by second and by step; pure."""

from __future__ import annotations

from dashboard.charts.chart_spec import Json, chart, trace, y_axis
from dashboard.charts.run_view import RunView
from stepscope.metrics import Unit

EMPTY = "No data yet: collectives are read at the end of a step, every 1 to 64 s."
UNREAD = "Collectives are not read: {}."
WHOSE = "Collectives of rank 0."


def communication(content: RunView) -> list[Json]:
    """Return the charts; none for a run of one process."""
    if content.ranks == 1:
        return []
    reasons = content.collectives
    unread = reasons.get("comm/bytes")
    empty = EMPTY if unread is None else UNREAD.format(unread)
    untimed = reasons.get("comm/time") if unread is None else None
    parts = [WHOSE, reasons.get("lost"), None if untimed is None else f"No times: {untimed}."]
    charts = [
        chart(
            "communication",
            "Communication",
            [trace("comm/rate", "points"), _timed("comm/share")],
            y=y_axis(Unit.BYTES_PER_SECOND),
            y2=y_axis(Unit.PERCENT),
            note=" ".join(filter(None, parts)),
            empty=empty,
            group="more",
        ),
        chart(
            "collectives",
            "Collectives per step",
            [trace("comm/bytes", "points"), _timed("comm/time")],
            y=y_axis(Unit.BYTES),
            y2=y_axis(Unit.SECOND),
            empty=empty,
            group="more",
        ),
    ]
    if "comm/bus_bandwidth" in reasons:
        return charts
    bus = [trace("comm/bus_bandwidth", "points", optional=True)]
    y = y_axis(Unit.BYTES_PER_SECOND)
    note = "Of timed collectives of at least 1 MiB."
    return [*charts, chart("bus", "Bus bandwidth", bus, y=y, note=note, empty=empty, group="more")]


def _timed(key: str) -> Json:
    return trace(key, "points", axis="y2", dash="dot", optional=True)
