"""Heatmaps of all ranks over time or steps, in a fixed number of columns. No I/O."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepscope.store import SeriesBlock
from stepscope.store.blocks import Floats

COLUMNS = 120
FIRST_WIDTHS = {"time": 0.25, "step": 1.0}
"""Smallest width of a column on each axis, in seconds or steps."""
MAX_X = 1e9  # larger values come from a wrong clock or a damaged file
METRICS = (
    *("perf/step_time", "perf/comm_wait", "perf/data_wait"),
    *("memory/allocated", "process/rss", "gpu/util", "train/loss"),
)
"""Metrics of the heatmap, in the order of the page."""
HIGHEST = ("memory/allocated", "process/rss")  # the maximum of a column, not the mean


@dataclass(frozen=True, slots=True)
class MetricPoints:
    """Values (n,) of a metric for the rank in row `row`, at `xs` (n,) in seconds or steps."""

    row: int
    xs: Floats
    values: Floats
    counts: Floats


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Columns of `width` seconds or steps.

    `cells` has 32-bit floats (columns, ranks) by metric, in base64; missing values are not finite.
    """

    width: float
    cells: Mapping[str, str] = field(default_factory=dict)


def points_of(
    block: SeriesBlock, row: int, created: float
) -> Iterator[tuple[str, str, MetricPoints]]:
    """Yield axis, metric and points of a series; time is in seconds since `created`."""
    for axis, xs in (("time", block.ts - created), ("step", block.step)):
        known = np.isfinite(xs) & (xs < MAX_X)
        for place, name in enumerate(block.keys):
            good = known & (block.count[place] > 0)
            if name in METRICS and good.any():
                values = (block.high if name in HIGHEST else block.mean)[place]
                counts = block.count[place][good]
                yield axis, name, MetricPoints(row, np.maximum(xs[good], 0), values[good], counts)


def heatmap(points: Mapping[str, Sequence[MetricPoints]], ranks: int, axis: str) -> Heatmap:
    """Return the heatmap of all metrics on an axis; the columns hold the whole run."""
    ends = [float(each.xs.max()) for listed in points.values() for each in listed]
    width, latest = FIRST_WIDTHS[axis], max(ends, default=0.0)
    while latest >= COLUMNS * width:
        width *= 2
    shape = int(latest / width) + 1, ranks
    recorded = [name for name in METRICS if name in points]
    with np.errstate(over="ignore", invalid="ignore"):  # damaged files
        return Heatmap(
            width, {name: _cells(points[name], shape, width, name in HIGHEST) for name in recorded}
        )


def _cells(
    points: Sequence[MetricPoints], shape: tuple[int, int], width: float, highest: bool
) -> str:
    sums, counts, tops = np.zeros(shape), np.zeros(shape), np.full(shape, -np.inf)
    for each in points:
        at = (each.xs / width).astype(np.intp)
        sums[:, each.row] += np.bincount(at, each.values * each.counts, shape[0])
        counts[:, each.row] += np.bincount(at, each.counts, shape[0])
        np.maximum.at(tops[:, each.row], at, each.values)
    means = np.divide(sums, counts, out=np.full(shape, np.nan), where=counts > 0)
    return base64.b64encode((tops if highest else means).astype("<f4").tobytes()).decode()
