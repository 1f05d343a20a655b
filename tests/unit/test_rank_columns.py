"""Values of many ranks in a fixed number of columns: means, changes, and their bytes."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from dashboard.ranks.time_grid import COLUMNS, FIRST_WIDTHS, HeatmapMetric, TimeGrid, packed

TIME, PEAK = "perf/step_time", "memory/allocated"
FIRST_WIDTH_S = FIRST_WIDTHS["time"]
STRIPS = (HeatmapMetric(TIME), HeatmapMetric(PEAK, highest=True))


def put(columns: TimeGrid, rank: int, name: str, *points: tuple[float, float]) -> None:
    times = np.array([at for at, _ in points])
    values = np.array([value for _, value in points])
    columns.add(rank, times, {name: (values, values, np.ones(len(points)))})


def row(columns: TimeGrid, rank: int, name: str) -> dict[int, float]:
    values = columns.values(name, np.arange(COLUMNS))[:, rank]
    return {int(at): float(values[at]) for at in np.flatnonzero(np.isfinite(values))}


def test_a_column_has_the_mean_of_a_rank_or_its_highest_value() -> None:
    columns = TimeGrid(STRIPS, 2)
    put(columns, 1, TIME, (0.0, 1.0), (0.1, 3.0), (0.3, 5.0))
    put(columns, 1, PEAK, (0.0, 1.0), (0.1, 3.0), (0.2, 2.0))
    assert row(columns, 1, TIME) == {0: 2.0, 1: 5.0}
    assert row(columns, 1, PEAK) == {0: 3.0}
    assert row(columns, 0, TIME) == {}
    assert columns.recorded() == [TIME, PEAK]


def test_two_columns_become_one_once_a_run_is_longer_than_all() -> None:
    columns = TimeGrid(STRIPS, 1)
    put(columns, 0, TIME, (0.0, 1.0), (0.25, 3.0), (0.5, 8.0))
    put(columns, 0, PEAK, (0.0, 1.0), (0.25, 3.0))
    before = columns.generation
    put(columns, 0, TIME, (COLUMNS * FIRST_WIDTH_S, 7.0))
    assert columns.width == 2 * FIRST_WIDTH_S
    assert columns.generation == before + 1
    assert row(columns, 0, TIME) == {0: 2.0, 1: 8.0, COLUMNS // 2: 7.0}
    assert row(columns, 0, PEAK) == {0: 3.0}


def test_only_columns_that_changed_are_told_oldest_change_first() -> None:
    columns = TimeGrid(STRIPS, 2)
    put(columns, 0, TIME, (0.0, 1.0), (0.3, 1.0), (0.6, 1.0))
    first, seen, waits = columns.since(TIME, 0, 2)
    assert (first.tolist(), waits) == ([0, 1], True)
    rest, seen, waits = columns.since(TIME, seen, 2)
    assert (rest.tolist(), waits) == ([2], False)
    put(columns, 1, PEAK, (0.6, 1.0))  # another strip
    assert columns.since(TIME, seen, 2)[0].tolist() == []
    put(columns, 1, TIME, (0.3, 9.0))  # a rank that was read later
    assert columns.since(TIME, seen, 2)[0].tolist() == [1]


def test_a_rank_read_anew_is_not_counted_twice() -> None:
    columns = TimeGrid(STRIPS, 2)
    put(columns, 0, TIME, (0.0, 1.0))
    put(columns, 1, TIME, (0.0, 2.0), (0.3, 2.0))
    _, seen, _ = columns.since(TIME, 0, 9)
    columns.clear(1, [TIME, PEAK])
    assert columns.since(TIME, seen, 9)[0].tolist() == [0, 1]
    put(columns, 1, TIME, (0.0, 4.0))
    assert (row(columns, 0, TIME), row(columns, 1, TIME)) == ({0: 1.0}, {0: 4.0})


def test_broken_times_and_values_are_left_out() -> None:
    columns = TimeGrid(STRIPS, 1)
    put(columns, 0, TIME, (np.nan, 1.0), (np.inf, 1.0), (1e300, 1.0), (-5.0, 2.0))
    put(columns, 0, TIME, (0.3, np.nan), (0.3, np.inf), (0.6, 1e308), (0.6, 1e308), (0.9, 1e308))
    assert columns.width == FIRST_WIDTH_S
    # A clock that is behind counts from the start.
    assert row(columns, 0, TIME) == {0: 2.0, 3: 1e308}
    assert np.isfinite(halves(packed(columns.values(TIME, np.arange(4))))[0])


def halves(strip: dict[str, object]) -> np.ndarray:  # type: ignore[type-arg]
    data = base64.b64decode(str(strip["data"]))
    return np.frombuffer(data, "<f2").astype(float) * float(str(strip["scale"]))


@pytest.mark.parametrize("scale", [1e-6, 0.04, 31e9])
def test_a_packed_value_is_off_by_less_than_the_page_shows(scale: float) -> None:
    values = np.random.default_rng(0).uniform(0.001, 1.0, (60, 64)) * scale
    values[3, 5] = np.nan
    strip = packed(values)
    assert len(strip["data"]) == -(-2 * values.size // 3) * 4
    found = halves(strip).reshape(values.shape)
    assert np.isnan(found[3, 5])
    error = np.abs(found / values - 1)
    assert np.nanmax(error) < 0.0005


def test_zero_and_nothing_are_packed_too() -> None:
    assert halves(packed(np.zeros((1, 2)))).tolist() == [0.0, 0.0]
    assert halves(packed(np.empty((0, 4)))).tolist() == []
    assert np.isnan(halves(packed(np.full((1, 1), np.nan)))).all()
