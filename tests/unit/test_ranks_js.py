"""The JavaScript of the Ranks tab without DOM, run in Node: half floats, rows, order, texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dashboard.ranks.rank_cache import STRIPS
from dashboard.ranks.time_grid import packed
from tests.support.javascript import Script, js

__all__ = ["js"]

NAMED = {
    "run": "r",
    "who": "w",
    "unread": 0,
    "live": True,
    "now": 4.0,
    "hosts": ["a", "b"],
    "ranks": [[0, 0, 0, "GPU 0"], [1, 1, 0, "GPU 1"], [2, 2, 1, "GPU 0"]],
    "world_size": 4,
    "missing": {"never started": [3]},
    "left_out": 0,
    "metrics": ["perf/step_time"],
    "columns": "c-0",
    "width": 0.5,
    "metric": "perf/step_time",
}
TABLE = {
    "table": {
        "step": [7, 8, 7],
        "time": [0.1, 0.1, 0.1],
        "wait": [20, 2, None],
        "data": [None, None, None],
        "memory": [10, 11, 12],
        "peak": [20, 21, 22],
    },
    "memory": "allocated",
    "state": "aac",
    "ends": [[2, 3.0, None]],
    "verdict": None,
}


def strip(values: list[list[float]], at: list[int], seen: int) -> dict[str, Any]:
    return {"strip": {"at": at} | packed(np.array(values)), "seen": seen, "more": False}


def data(js: Script, expression: str, *answers: dict[str, Any]) -> Any:
    return js(
        "(() => { const data = new RankData(); data.open('r');"
        f"for (const answer of answers) data.take(answer); return {expression}; }})()",
        answers=list(answers),
    )


FIRST = NAMED | strip([[1, 2, 3], [1, 2, 3]], [0, 1], 5)
LATE = NAMED | strip([[1, 2, 3]], [5], 5)
"""The first value is in column 5."""


@pytest.mark.parametrize("scale", [1e-9, 0.04, 31e9])
def test_the_browser_reads_the_values_that_the_server_packs(js: Script, scale: float) -> None:
    values = np.random.default_rng(1).uniform(0.0001, 1, (7, 5)) * scale
    values[2, 3] = np.nan
    found = js("unpacked(strip, 7, 5)", strip=packed(values))
    assert found[2][3] is None
    found[2][3] = np.nan
    assert np.nanmax(np.abs(np.array(found, dtype=float) / values - 1)) < 0.0005


def test_columns_replace_columns_and_another_width_starts_anew(js: Script) -> None:
    second = {**NAMED, **strip([[4, 5, np.nan]], [1], 6)}
    rows = data(js, "[0, 2].map((row) => data.strip(row))", FIRST, second)
    assert [(row["xs"], row["values"]) for row in rows] == [([0, 0.5], [1, 4]), ([0], [3])]
    wider = {**NAMED, "columns": "c-1", "width": 1, **strip([[9, 9, 9]], [0], 7)}
    assert data(js, "data.strip(0)", FIRST, wider)["values"] == [9]
    assert data(js, "(data.chooseAxis('step'), data.strip(0).xs)", FIRST) == []


@pytest.mark.parametrize(
    ("answer", "begin", "end"),
    [(LATE, 2.5, 4), (LATE | {"now": 100}, 0, 100), (FIRST, 0, 4)],
)
def test_the_time_before_the_first_step_is_cut(
    js: Script, answer: dict[str, Any], begin: float, end: float
) -> None:
    assert data(js, "[data.begin, data.end]", answer) == [begin, end]


def test_the_next_question_names_what_the_browser_has(js: Script) -> None:
    more = FIRST | {"more": True}
    known = {"run": "r", "metric": "", "axis": "time", "columns": "c-0", "seen": 5, "who": "w"}
    assert data(js, "data.question()", more) == known
    assert data(js, "data.question().only_strips", more, more | TABLE) == 1
    waiting = {"run": "r", "live": True, "now": 1, "unread": 3, "more": True}
    assert data(js, "[data.unread, data.question().who]", waiting) == [3, ""]
    steps = data(js, "(data.chooseAxis('step'), data.question())", FIRST)
    assert steps == known | {"axis": "step", "columns": "", "seen": 0}


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
    answer = NAMED | strip([[1, 2, 3]] * columns, list(range(columns)), 5) | {"width": width}
    assert data(js, f"(data.axis = 'step', {expression})", answer) == found


def test_an_axis_of_time(js: Script) -> None:
    found = data(js, "[data.where(185), data.ticks(300).text]", LATE | TABLE)
    assert found == ["3:05", ["0:03", "0:04"]]


@pytest.mark.parametrize("end", [1, 2, 7, 119, 3_000, 999_999])
def test_ticks_of_steps_are_whole_inside_the_axis_and_few(js: Script, end: int) -> None:
    found = js("stepTicks(0, end, 4)", end=end)["values"]
    assert 1 <= len(found) <= 5
    assert all(value == int(value) and 0 <= value < end for value in found)


def test_rows_of_the_table_and_ranks_without_a_file(js: Script) -> None:
    rows = data(js, "data.rows()", FIRST | TABLE)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    busy = [pytest.approx(0.08), pytest.approx(0.098), None, None]
    assert [row.get("own") for row in rows] == busy
    words = js("rows.map((row) => [stateWords(row, clock), wentWrong(row)])", rows=rows)
    alive, dead = ["alive", False], ["dead since 0:03", True]
    assert words == [alive, alive, dead, ["never started", True]]


GIVEN = {
    "busy": [{"rank": 0, "own": 1.0}, {"rank": 1, "own": None}, {"rank": 2, "own": 3.0}],
    "hosts": [{"rank": rank, "host": host} for rank, host in enumerate("baa")],
    "places": [{"rank": rank, "place": f"GPU {n}"} for rank, n in enumerate((10, 2, 1))],
    "states": [{"rank": n, "state": s} for n, s in enumerate([*"sxcpfa", "never started"])],
    "steady": [[1.0, 1.02]] * 60,
    "ranks": [[n, n, 0, ""] for n in range(8)],
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
        ("[[3], [1, 2], []].map(listed)", ["3", "1 and 2", ""]),
        ("[[0, 1, 2, 5], [4, 1, 6]].map(listed)", ["0–2 and 5", "1, 4 and 6"]),
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


def test_each_metric_of_the_strips_has_its_texts(js: Script) -> None:
    texts = js("METRICS")
    assert list(texts) == [strip.name for strip in STRIPS]
    assert all(len(each) == 4 for each in texts.values())


def test_missing_ranks_are_named(js: Script) -> None:
    named = {"missing": {"never started": [5], "elsewhere": [8, 9, 10]}, "left_out": 2}
    assert js("missingWords(named)", named=named) == (
        "Rank 5 never started, or is not watched. Ranks 8–10 are recorded in another folder, if at "
        "all: hosts that share no disk have one each. 2 more ranks are recorded and not shown."
    )
    assert js("missingWords(named)", named={"missing": {}, "left_out": 0}) == ""
