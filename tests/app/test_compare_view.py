"""The Compare page: what it draws for runs of an address, and what it says of others."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.services import Services
from tests.support.app_page import OpenPage, at_address, text_of
from tests.support.fake_source import FakeSource
from tests.support.recorded_runs import write_run

MAX_RUNS = 50
EACH, OWN = "each run", "group of the runs"
"""Of dashboard/views/compare.py, which draws the page when it is imported."""


def record(root: Path, run: str, seconds: float = 0.1, /, **run_json: Any) -> None:
    rows = [
        (seconds * step, step, {"perf/step_time": seconds, "train/loss": 1.0 / step})
        for step in range(1, 41)
    ]
    content = {"kind": "init", "name": "job", "config": {"lr": 0.1}, "step": 40} | run_json
    write_run(root / run, content, steps=rows)


def opened(page: OpenPage, *runs: str) -> AppTest:
    return at_address(page, "compare", runs=",".join(runs))


def figures(app: AppTest) -> list[Any]:
    """The Plotly figures of the page."""
    found = [json.loads(part.proto.spec) for part in app.get("plotly_chart")]
    for trace in (trace for figure in found for trace in figure["data"]):
        for axis in "xy":  # Plotly's JSON of an array
            array = trace[axis]
            trace[axis] = np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"]).tolist()
    return found


def drawn_names(app: AppTest, group: str) -> list[str]:
    """Return the names of the lines of step time, grouped by this choice."""
    app.multiselect(key="compare_metrics").set_value(["perf/step_time"])
    app.selectbox(key="compare_group").select(group).run()
    assert not app.exception
    (figure,) = figures(app)
    return [one["name"] for one in figure["data"] if "name" in one]


def tables(app: AppTest) -> list[dict[str, list[Any]]]:
    """The rows of each table by their label; the figures are the first."""
    return [{row[0]: row[1:] for row in frame.value.values.tolist()} for frame in app.dataframe]


def test_runs_of_the_address_are_drawn_with_changes_to_the_baseline(
    page: OpenPage, server: Services
) -> None:
    record(server.runs, "a")
    record(server.runs, "b", 0.2, config={"lr": 0.2})
    app = opened(page, "a", "b")
    assert [len(trace["x"]) for trace in figures(app)[0]["data"]] == [40, 40]
    rows = tables(app)[0]
    assert rows["Run"] == ["a", "b"]
    assert rows["Step time"] == ["100 ms", "200 ms (+100.0%)"]
    app.selectbox(key="compare_baseline").select(1).run()
    assert not app.exception
    assert tables(app)[0]["Step time"] == ["100 ms (−50.0%)", "200 ms"]
    app.multiselect(key="compare_runs").set_value(["a"]).run()
    assert not app.exception
    assert tables(app)[0]["Step time"] == ["100 ms"]
    assert app.query_params["runs"] == "a"


def test_a_group_is_a_mean_with_a_band_and_a_missing_setting_is_not_the_text_none(
    page: OpenPage, server: Services
) -> None:
    for name, group, seconds in (("a", "g", 0.1), ("b", "g", 0.2), ("c", None, 1), ("d", None, 1)):
        config = {"compile": "none"} if name == "b" else {}
        record(server.runs, name, seconds, group=group, config=config)
    app = opened(page, "a", "b", "c", "d")
    groups = drawn_names(app, OWN)
    band, mean = figures(app)[0]["data"][:2]
    assert {round(value, 6) for value in mean["y"]} == {150.0}, "ms"
    assert {round(value, 6) for value in band["y"]} == {100.0, 200.0}
    assert groups[0] == "group: g"
    assert len(groups) == 3, "two lines without a group"
    assert {*drawn_names(app, "compile")} == {"compile: not set", "compile: none"}


@pytest.mark.parametrize(("axis", "last"), [("step", 40), ("time", 4.0), ("samples", None)])
def test_axes(page: OpenPage, server: Services, axis: str, last: float | None) -> None:
    record(server.runs, "a")
    app = opened(page, "a")
    app.selectbox(key="compare_axis").select(axis).run()
    assert not app.exception
    ends = [trace["x"][-1] for figure in figures(app) for trace in figure["data"]]
    assert ends == ([] if last is None else [pytest.approx(last)] * 2)


def test_a_page_without_runs_and_with_unknown_ones(
    page: OpenPage, server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(server.runs, "a")
    assert not opened(page).dataframe
    record(server.runs, "far")  # a remote run whose store is not here yet
    (server.runs / "far" / "rank0.sqlite").unlink()
    source = FakeSource(server.runs)
    monkeypatch.setattr(server, "source_of", lambda run: source if run.id == "far" else None)
    app = opened(page, "a", "gone", "../../etc", "far")
    assert "gone" in text_of(app)
    assert tables(app)[0]["Run"] == ["a"]


def test_a_link_to_too_many_runs_draws_the_first(page: OpenPage, server: Services) -> None:
    names = [f"r{number:02}" for number in range(MAX_RUNS + 5)]
    record(server.runs, names[0])
    for name in names[1:]:
        shutil.copytree(server.runs / names[0], server.runs / name)
    app = opened(page, *names)
    assert tables(app)[0]["Run"] == names[:MAX_RUNS]


def test_hostile_metadata_is_text(page: OpenPage, server: Services) -> None:
    evil = "<img src=x onerror=alert(1)>**b** $x$ `c`"
    record(server.runs, "a", name=evil, config={evil: evil}, environment={"gpu": evil})
    app = opened(page, "a")
    drawn = json.dumps(figures(app))
    assert "<img" not in drawn
    assert "**b**" not in text_of(app).replace("\\*", "")
