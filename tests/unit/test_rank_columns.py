"""Heatmaps of many ranks in a fixed number of columns: means and maxima."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from dashboard.ranks.job_ranks import COLUMNS, FIRST_WIDTHS, MetricPoints, heatmap, points_of
from stepscope.store import SeriesBlock

TIME, PEAK = "perf/step_time", "memory/allocated"
WIDTH_S = FIRST_WIDTHS["time"]


def drawn(ranks: int, *rows: tuple[int, str, float, float]) -> dict[str, dict[int, list[float]]]:
    """Return the columns with a value of rows (rank, metric, time, value), and the width."""
    points: dict[str, list[MetricPoints]] = {}
    for rank, name, at, value in rows:
        block = SeriesBlock.from_rows([(100.0 + at, 1, {name: value})])
        for axis, key, found in points_of(block, rank, created=100.0):
            if axis == "time":
                points.setdefault(key, []).append(found)
    made = heatmap(points, ranks, "time")
    cells = {
        name: np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, ranks).astype(float)
        for name, text in made.cells.items()
    }
    known = {
        name: {at: row.tolist() for at, row in enumerate(values) if np.isfinite(row).any()}
        for name, values in cells.items()
    }
    return known | {"width": {0: [made.width]}}


def test_a_column_has_the_mean_of_a_rank_or_its_highest_value() -> None:
    rows = [(1, TIME, 0.0, 1.0), (1, TIME, 0.1, 3.0), (1, TIME, 0.3, 5.0), (0, TIME, 0.3, 0.0)]
    rows += [(0, PEAK, 0.0, 1.0), (0, PEAK, 0.1, 3.0), (0, PEAK, 0.2, 2.0)]
    found = drawn(2, *rows)
    assert list(found) == [TIME, PEAK, "width"]
    assert found[TIME] == {0: [pytest.approx(np.nan, nan_ok=True), 2.0], 1: [0.0, 5.0]}
    assert found[PEAK] == {0: [3.0, -np.inf]}


def test_columns_are_wider_in_a_longer_run() -> None:
    long = (0, TIME, COLUMNS * WIDTH_S, 7.0)
    found = drawn(1, (0, TIME, 0.0, 1.0), (0, TIME, 0.25, 3.0), (0, TIME, 0.5, 8.0), long)
    assert found == {TIME: {0: [2.0], 1: [8.0], 60: [7.0]}, "width": {0: [2 * WIDTH_S]}}


def test_broken_times_and_values_are_left_out() -> None:
    times = [np.nan, np.inf, 1e300]
    rows = [(0, TIME, at, 1.0) for at in times] + [(0, TIME, -5.0, 2.0)]
    rows += [(0, TIME, 0.3, np.nan), (0, TIME, 0.3, np.inf), (0, TIME, 0.6, 1e308)]
    found = drawn(1, *rows, (0, TIME, 0.9, 4.0))
    # A clock that is behind counts from the start.
    assert found == {TIME: {0: [2.0], 3: [4.0]}, "width": {0: [WIDTH_S]}}
    assert drawn(1, *rows[:3]) == {"width": {0: [WIDTH_S]}}
