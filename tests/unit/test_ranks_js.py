"""The JavaScript of the Ranks tab without DOM, run in Node: cells, rows, order, texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dashboard.ranks.job_ranks import METRICS
from tests.support.javascript import Script, js

__all__ = ["js"]

NAMED = {
    "run": "r",
    "axis": "time",
    "live": True,
    "now": 4.0,
    "ranks": [[0, "a", "GPU 0"], [1, "a", "GPU 1"], [2, "b", "GPU 0"]],
    "world_size": 4,
    "missing": {"never started": [3]},
    "missing_text": "",
    "metrics": ["perf/step_time"],
    "width": 0.5,
    "metric": "perf/step_time",
    "table": {
        "step": [7, 8, 7],
        "time": [0.1, 0.1, 0.1],
        "wait": [20, 2, None],
        "data": [None, None, None],
        "memory": [10, 11, 12],
        "peak": [20, 21, 22],
    },
    "memory": "allocated",
    "state": ["alive", "alive", "dead"],
    "ends": [[2, 3.0, None]],
    "verdict": None,
}


def cells(*columns: Sequence[float]) -> dict[str, Any]:
    data = np.array(columns, "<f4").tobytes()
    return {"cells": base64.b64encode(data).decode()}


def data(js: Script, expression: str, *answers: dict[str, Any]) -> Any:
    return js(
        "(() => { const data = new RankData(); data.open('r');"
        f"for (const answer of answers) data.take(answer); return {expression}; }})()",
        answers=list(answers),
    )


NONE = [np.nan] * 3
FIRST = NAMED | cells([1, 2, 3], [1, 2, 3])
LATE = NAMED | cells(*[NONE] * 5, [1, 2, 3])
"""The first value is in column 5."""


def test_each_answer_has_all_columns(js: Script) -> None:
    second = NAMED | cells([1, 2, np.inf], [4, 5, np.nan])
    rows = data(js, "[0, 2].map((row) => data.strip(row))", FIRST, second)
    assert [(row["xs"], row["values"]) for row in rows] == [([0, 0.5], [1, 4]), ([], [])]
    wider = NAMED | {"width": 1} | cells([9, 9, 9])
    assert data(js, "data.strip(0)", FIRST, wider)["values"] == [9]
    assert data(js, "(data.chooseAxis('step'), data.strip(0).xs)", FIRST) == []
    late = "(data.chooseAxis('step'), data.take(answers[0]), data.strip(0).xs)"
    assert data(js, late, FIRST) == []
    empty = NAMED | {"metrics": [], "metric": None, "cells": ""}
    assert data(js, "data.metrics.length + data.cells.length", empty) == 0


@pytest.mark.parametrize(
    ("answer", "begin", "end"),
    [(LATE, 2.5, 4), (LATE | {"now": 100}, 0, 100), (FIRST, 0, 4)],
)
def test_the_time_before_the_first_step_is_cut(
    js: Script, answer: dict[str, Any], begin: float, end: float
) -> None:
    assert data(js, "[data.begin, data.end]", answer) == [begin, end]


def test_the_next_question_and_an_answer_before_the_ranks_are_read(js: Script) -> None:
    known = {"run": "r", "metric": "", "axis": "time"}
    assert data(js, "data.question()", FIRST) == known
    unread = {"run": "r", "live": True, "now": 1, "axis": "time"}
    assert data(js, "[data.answer, data.ranks, data.rows()]", unread) == [None, 0, []]
    asked = data(js, "(data.chooseAxis('step'), data.choose('m'), data.question())", FIRST)
    assert asked == {"run": "r", "metric": "m", "axis": "step"}


@pytest.mark.parametrize(
    ("expression", "width", "columns", "found"),
    [
        ("[data.begin, data.end]", 1, 3, [0, 3]),  # not the time of the run
        ("data.ticks(300)", 1, 3, {"values": [0.5, 1.5, 2.5], "text": ["0", "1", "2"]}),
        ("data.ticks(400).text", 64, 100, ["0", "2,000", "4,000", "6,000"]),
        ("[0.5, 2.5].map((x) => data.where(x))", 1, 3, ["step 0", "step 2"]),
        ("[9, 2999].map((x) => data.where(x))", 1024, 3, ["steps 0–1,023", "steps 2,048–3,071"]),
    ],
)
def test_an_axis_of_steps(
    js: Script, expression: str, width: float, columns: int, found: Any
) -> None:
    answer = NAMED | cells(*[[1, 2, 3]] * columns) | {"width": width}
    assert data(js, f"(data.axis = 'step', {expression})", answer) == found


def test_an_axis_of_time(js: Script) -> None:
    found = data(js, "[data.where(185), data.ticks(300).text]", LATE)
    assert found == ["3:05", ["0:03", "0:04"]]


@pytest.mark.parametrize("end", [1, 2, 7, 119, 3_000, 999_999])
def test_ticks_of_steps_are_whole_inside_the_axis_and_few(js: Script, end: int) -> None:
    found = js("stepTicks(0, end, 4)", end=end)["values"]
    assert 1 <= len(found) <= 5
    assert all(value == int(value) and 0 <= value < end for value in found)


def test_rows_of_the_table_and_ranks_without_a_file(js: Script) -> None:
    rows = data(js, "data.rows()", FIRST)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    busy = [pytest.approx(0.08), pytest.approx(0.098), None, None]
    assert [row.get("own") for row in rows] == busy
    words = js("rows.map((row) => [stateWords(row), wentWrong(row)])", rows=rows)
    alive, dead = ["alive", False], ["dead since 0:03", True]
    assert words == [alive, alive, dead, ["never started", True]]


GIVEN = {
    "busy": [{"rank": 0, "own": 1.0}, {"rank": 1, "own": None}, {"rank": 2, "own": 3.0}],
    "hosts": [{"rank": rank, "host": host} for rank, host in enumerate("baa")],
    "places": [{"rank": rank, "place": f"GPU {n}"} for rank, n in enumerate((10, 2, 1))],
    "states": [
        {"rank": rank, "state": state}
        for rank, state in enumerate(
            ("stopped", "failed", "dead", "starting", "finished", "alive", "never started")
        )
    ],
    "steady": [[1.0, 1.02]] * 60,
    "ranks": [[n, "a", ""] for n in range(8)],
}


def order(rows: str, key: str, descending: bool = False) -> str:
    return f"sorted({rows}, '{key}', {str(descending).lower()}).map(({{rank}}) => rank)"


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        (order("busy", "own", True), [2, 0, 1]),  # a rank without a value is last
        (order("busy", "own"), [0, 2, 1]),
        (order("hosts", "host"), [1, 2, 0]),
        (order("places", "place"), [2, 1, 0]),
        # alive, dead, failed, finished, never started, starting, stopped
        (order("states", "state"), [5, 2, 1, 4, 6, 3, 0]),
        ("usualSort(null, busy)", {"key": "rank", "descending": False}),
        ("usualSort({kind: 'straggler'}, busy)", {"key": "own", "descending": True}),
        ("COLUMNS.slice(0, 2).map(([key]) => key)", ["rank", "state"]),  # in view on a phone
        ("COLUMNS.map(([key]) => key).filter(startsDescending).length", 7),
        ("['rank', 'state', 'host', 'place'].some(startsDescending)", False),
        ("Object.values(colorRange(steady, 'perf/step_time'))", [0.714, 1.02, False]),
        # A slow first step does not set the scale.
        ("Object.values(colorRange([[50], ...steady], 'a'))", [0.714, 1.02, True]),
        ("colorRange(steady, 'gpu/util').high", 100),
        ("colorRange(steady, 'perf/data_wait').low", 0),
        ("Object.values(colorRange([[0, 0]], 'x'))", [0, 1, False]),
        ("colorRange([[null, null]], 'x')", None),
        # As many rows are named as fit.
        ("rowLabels(ranks, 5, new Set([2])).map(({text}) => text)", ["0", "<b>▸ 2</b>", "3", "6"]),
        ("rowLabels(ranks, 26, new Set())[7]", {"row": 7, "text": "7"}),
    ],
)
def test_sorting_texts_and_colors(js: Script, expression: str, found: Any) -> None:
    numeric = expression.startswith("Object.values(colorRange")
    assert js(expression, **GIVEN) == (pytest.approx(found) if numeric else found)


def test_each_metric_of_the_heatmap_has_its_texts(js: Script) -> None:
    texts = js("METRICS")
    assert list(texts) == list(METRICS)
    assert all(len(each) == 4 for each in texts.values())
