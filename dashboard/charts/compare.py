"""A metric of several runs in one Plotly figure: each run, or the mean of each group. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dashboard.charts import figures
from dashboard.charts.figures import Json
from dashboard.charts.run_view import run_name
from stepscope.compare.comparison import ComparisonRow
from stepscope.run import RunInfo
from stepscope.store.blocks import Floats

POINTS = 300  # of the mean of a group
HEIGHT_PX = 340
LEGEND_ROW_PX = 20
NAME_CHARS = 24
COLORS = (figures.BLUE, figures.ORANGE, figures.GREEN, figures.PINK, figures.AMBER, figures.GRAY)
DASHES = ("solid", "dash", "dot", "dashdot")  # of more runs than colors


class RunLine(NamedTuple):
    """A metric of a run; `x` increases, both have the same length."""

    x: Floats
    y: Floats


def line_names(runs: Sequence[RunInfo], settings: Sequence[ComparisonRow]) -> list[str]:
    """Return numbered names; equal ones with the only setting that differs, or the id's end."""
    names = [run_name(run) for run in runs]
    numbered = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        text = name
        equal = [other for other, other_name in enumerate(names) if other_name == name]
        if len(equal) > 1:
            rows = [row for row in settings if len({row.values[other] for other in equal}) > 1]
            more = run.id.rpartition("-")[2]
            if len(rows) == 1:
                more = f"{rows[0].label}={rows[0].shown(index)}"
            length = max(8, NAME_CHARS - len(more) - 6)  # The legend cuts the end.
            short = name if len(name) <= length else f"{name[: length - 1]}…"
            text = f"{short} {more}"
        numbered.append(f"{index + 1} · {text}")
    return numbered


def smooth(values: Floats, weight: float) -> Floats:
    """Return the exponential moving average, unbiased; `weight` (0 to 1): of all earlier points."""
    smoothed = np.empty_like(values)
    mean = 0.0
    total = 0.0
    for index, value in enumerate(values.tolist()):
        mean = weight * mean + value
        total = weight * total + 1.0
        smoothed[index] = mean / total
    return smoothed


def mean_of(lines: Sequence[RunLine]) -> tuple[RunLine, Floats, Floats]:
    """Return the mean of lines, and the lowest and the highest, where all of them have values."""
    x = np.linspace(*_common_range(lines), POINTS)
    y = np.array([np.interp(x, line.x, line.y) for line in lines])
    return RunLine(x, y.mean(axis=0)), y.min(axis=0), y.max(axis=0)


def _common_range(lines: Sequence[RunLine]) -> tuple[float, float]:
    """Return where all lines have values; the first is larger than the second if nowhere."""
    return max(line.x[0] for line in lines), min(line.x[-1] for line in lines)


def overlay(
    groups: Mapping[str, Sequence[RunLine]], x_title: str, y_title: str, weight: float, *, log: bool
) -> Json:
    """Return the figure of groups by name; one of several lines is their mean with a band.

    Lines without a common range are drawn one by one. Points are arrays: lists of 20 runs are slow.
    """
    data: list[Json] = []
    for number, (name, lines) in enumerate(groups.items()):
        color = COLORS[number % len(COLORS)]
        drawn = {"color": color, "width": 2, "dash": DASHES[number // len(COLORS) % len(DASHES)]}
        smoothed = [RunLine(line.x, smooth(line.y, weight)) for line in lines]
        quiet = {"type": "scatter", "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
        start, end = _common_range(smoothed)
        if len(lines) > 1 and start < end:
            line, low, high = mean_of(smoothed)
            smoothed = [line]
            band = {"x": np.r_[line.x, line.x[::-1]], "y": np.r_[high, low[::-1]], "fill": "toself"}
            data.append(quiet | band | {"fillcolor": color, "opacity": 0.2, "line": {"width": 0}})
        elif weight:  # the values themselves
            faint = {"opacity": 0.25, "line": {"color": color, "width": 1}}
            data += [quiet | faint | {"x": line.x, "y": line.y} for line in lines]
        shown = {"name": figures.shortened(name, NAME_CHARS), "line": drawn}
        shown |= {"legendgroup": name} if len(smoothed) > 1 else {}
        for at, line in enumerate(smoothed):
            points = {"x": line.x, "y": line.y, "showlegend": at == 0}
            data.append({"type": "scatter", "mode": "lines"} | points | shown)
    scale = {"type": "log" if log else "linear", "automargin": True, "zeroline": False}
    drawing = figures.layout(
        HEIGHT_PX + LEGEND_ROW_PX * -(-len(groups) // 2),
        dragmode="zoom",
        showlegend=True,
        xaxis={"title": figures.title(figures.plain(x_title)), "zeroline": False},
        yaxis=scale | {"title": figures.title(figures.plain(y_title))},
    )
    drawing["margin"] |= {"t": 12}
    drawing["legend"] |= {"y": -0.2, "yanchor": "top"}
    return {"data": data, "layout": drawing}
