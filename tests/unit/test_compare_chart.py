"""The lines of the Compare page: smoothing, and the mean of a group with its band."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dashboard.charts.compare import (
    POINTS,
    RunLine,
    line_names,
    mean_of,
    overlay,
    smooth,
)
from stepscope.compare.comparison import ComparisonRow
from stepscope.run import RunInfo, RunStatus


def line(start: float, stop: float, value: float) -> RunLine:
    x = np.arange(start, stop)
    return RunLine(x, np.full(len(x), value))


def info(folder: str, script: str) -> RunInfo:
    content = {"name": Path(script).stem, "script": {"path": f"/home/x/{script}"}}
    return RunInfo(Path(folder), RunStatus.FINISHED, None, 0.0, content)


def test_runs_of_one_script_have_the_setting_that_differs_or_their_id() -> None:
    runs = [info(f"2026-train-{end}", "train.py") for end in ("ab1", "cd2")]
    rate = ComparisonRow("lr", "lr", ("0.1", None, "0.1"))
    both = [*runs, info("2026-eval-ef3", "eval.py")]
    assert line_names(both, [rate]) == [
        "1 · train.py lr=0.1",
        "2 · train.py lr=not set",
        "3 · eval.py",
    ]
    assert line_names(both, []) == ["1 · train.py ab1", "2 · train.py cd2", "3 · eval.py"]


def test_smoothing_keeps_a_constant_and_does_not_begin_at_0() -> None:
    assert smooth(np.full(9, 3.0), 0.9) == pytest.approx([3.0] * 9)
    values = np.array([1.0, 3.0])
    assert smooth(values, 0.5) == pytest.approx([1.0, (0.5 + 3.0) / 1.5])


def test_a_group_is_drawn_where_all_its_runs_have_values() -> None:
    mean, low, high = mean_of([line(0, 10, 1.0), line(5, 20, 3.0)])
    assert (len(mean.x), mean.x[0], mean.x[-1]) == (POINTS, 5, 9)
    assert set(mean.y) == {2.0}
    assert (set(low), set(high)) == ({1.0}, {3.0})


def test_a_group_whose_runs_have_no_common_time_has_a_line_per_run() -> None:
    apart = [line(0, 5, 1.0), line(10, 20, 3.0)]
    for weight, faint in ((0.0, 0), (0.5, 2)):
        data = overlay({"a": apart}, "time", "loss", weight, log=False)["data"]
        assert [trace["x"][-1] for trace in data[faint:]] == [4, 19]
        assert [trace["showlegend"] for trace in data] == [False] * faint + [True, False]


def test_more_runs_than_colors_have_other_dashes_and_hostile_names_are_text() -> None:
    groups = {f"<b>{number}": [line(0, 3, number)] for number in range(20)}
    data = overlay(groups, "step", "<i>", 0.0, log=True)["data"]
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in data}) == 20
    assert all(trace["name"].startswith("&lt;b") for trace in data)
