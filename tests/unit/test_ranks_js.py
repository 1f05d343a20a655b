"""The pure JavaScript of the section Ranks, run in Node: half floats, rows, order, words."""

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


@pytest.mark.parametrize("scale", [1e-9, 0.04, 31e9])
def test_the_browser_reads_the_values_that_the_server_packs(js: Script, scale: float) -> None:
    values = np.random.default_rng(1).uniform(0.0001, 1, (7, 5)) * scale
    values[2, 3] = np.nan
    found = js("unpacked(strip, 7, 5)", strip=packed(values))
    assert found[2][3] is None
    found[2][3] = np.nan
    assert np.nanmax(np.abs(np.array(found, dtype=float) / values - 1)) < 0.0005


def test_columns_replace_those_before_and_another_width_begins_anew(js: Script) -> None:
    first = NAMED | strip([[1, 2, 3], [1, 2, 3]], [0, 1], 5)
    second = {**NAMED, **strip([[4, 5, np.nan]], [1], 6)}
    lines = data(js, "[0, 2].map((row) => data.line(row))", first, second)
    assert lines == [{"xs": [0.25, 0.75], "values": [1, 4]}, {"xs": [0.25], "values": [3]}]
    assert data(js, "data.meanLine().values", first, second) == [2, 4.5]
    assert data(js, "data.strip(0).xs", first) == [0, 0.5, 1]
    wider = {**NAMED, "columns": "c-1", "width": 1, **strip([[9, 9, 9]], [0], 7)}
    assert data(js, "data.line(0)", first, wider) == {"xs": [0.5], "values": [9]}


def test_the_time_before_the_first_step_is_left_out(js: Script) -> None:
    late = NAMED | strip([[1, 2, 3]], [5], 5)
    assert data(js, "[data.begin, data.end]", late) == [2.5, 4]
    assert data(js, "[data.begin, data.end]", late | {"now": 100}) == [0, 100]
    assert data(js, "data.begin", NAMED | strip([[1, 2, 3]], [0], 5)) == 0


def test_the_next_question_says_what_the_tab_has(js: Script) -> None:
    first = NAMED | strip([[1, 2, 3]], [0], 5) | {"more": True}
    asked = data(js, "data.question()", first)
    known = {"columns": "c-0", "seen": 5, "who": "w"}
    assert asked == {"run": "r", "metric": "", "axis": "time"} | known
    assert data(js, "data.question().only_strips", first, first | TABLE | {"more": True}) == 1
    waiting = {"run": "r", "live": True, "now": 1, "unread": 3, "more": True}
    assert data(js, "[data.unread, data.question().who]", waiting) == [3, ""]


def test_another_axis_begins_anew(js: Script) -> None:
    first = NAMED | strip([[1, 2, 3]], [0], 5)
    question = data(js, "(data.chooseAxis('step'), data.question())", first)
    assert (question["axis"], question["columns"], question["seen"]) == ("step", "", 0)
    assert question["who"] == "w"
    assert data(js, "(data.chooseAxis('step'), data.line(0).xs)", first) == []


def over_steps(js: Script, expression: str, width: float, columns: int) -> Any:
    answer = NAMED | strip([[1, 2, 3]] * columns, list(range(columns)), 5) | {"width": width}
    return data(js, f"(data.axis = 'step', {expression})", answer)


def test_an_axis_of_steps_ends_with_the_last_and_names_whole_steps(js: Script) -> None:
    assert over_steps(js, "[data.begin, data.end]", 1, 3) == [0, 3]  # not the time of the run
    few = over_steps(js, "data.ticks(300)", 1, 3)
    assert few == {"values": [0.5, 1.5, 2.5], "text": ["0", "1", "2"]}
    many = over_steps(js, "data.ticks(400)", 64, 100)
    assert many["text"] == ["0", "2,000", "4,000", "6,000"]
    where = "[0.5, 2.5].map((column) => data.where(column * data.width))"
    assert over_steps(js, where, 1, 3) == ["step 0", "step 2"]
    assert over_steps(js, where, 1024, 3) == ["steps 0–1,023", "steps 2,048–3,071"]
    late = NAMED | strip([[1, 2, 3]], [5], 5) | TABLE
    assert data(js, "[data.where(185), data.ticks(300).text]", late) == ["3:05", ["0:03", "0:04"]]


@pytest.mark.parametrize("end", [1, 2, 7, 119, 3_000, 999_999])
def test_ticks_of_steps_are_whole_inside_the_axis_and_few(js: Script, end: int) -> None:
    found = js("stepTicks(0, end, 4)", end=end)["values"]
    assert 1 <= len(found) <= 5
    assert all(value == int(value) and 0 <= value < end for value in found)


def test_rows_of_the_table_and_ranks_without_a_file(js: Script) -> None:
    rows = data(js, "data.rows()", NAMED | strip([[1, 2, 3]], [0], 5) | TABLE)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("own") for row in rows] == [pytest.approx(0.08), pytest.approx(0.098)] + [
        None,
        None,
    ]
    words = js("rows.map((row) => stateWords(row, clock))", rows=rows)
    assert words == ["alive", "alive", "dead since 0:03", "never started"]
    assert js("rows.map(wentWrong)", rows=rows) == [False, False, True, True]


def test_the_slowest_comes_first_where_a_rank_is_named(js: Script) -> None:
    rows = [{"rank": 0, "own": 1.0}, {"rank": 1, "own": None}, {"rank": 2, "own": 3.0}]
    usual = "usualSort(verdict, rows)"
    assert js(usual, verdict=None, rows=rows) == {"key": "rank", "descending": False}
    found = js(usual, verdict={"kind": "straggler"}, rows=rows)
    assert found == {"key": "own", "descending": True}
    order = "sorted(rows, key, down).map(({rank}) => rank)"
    assert js(order, rows=rows, key="own", down=True) == [2, 0, 1]
    assert js(order, rows=rows, key="own", down=False) == [0, 2, 1]
    hosts = [{"rank": 0, "host": "b"}, {"rank": 1, "host": "a"}, {"rank": 2, "host": "a"}]
    assert js(order, rows=hosts, key="host", down=False) == [1, 2, 0]


def test_texts_are_sorted_as_they_are_read(js: Script) -> None:
    order = "sorted(rows, key, false).map(({rank}) => rank)"
    places = [{"rank": rank, "place": f"GPU {number}"} for rank, number in enumerate((10, 2, 1))]
    assert js(order, rows=places, key="place") == [2, 1, 0]
    states = [{"rank": rank, "state": state} for rank, state in enumerate("sxcpfa")]
    states.append({"rank": 6, "state": "never started"})
    # alive, dead, failed, finished, never started, starting, stopped
    assert js(order, rows=states, key="state") == [5, 2, 1, 4, 6, 3, 0]
    first = js("COLUMNS.map(([key]) => [key, startsDescending(key)])")
    assert [key for key, down in first if not down] == ["rank", "state", "host", "place"]


def test_each_metric_of_the_strips_has_its_words(js: Script) -> None:
    words = js("METRICS")
    assert list(words) == [strip.name for strip in STRIPS]
    assert all(len(each) == 4 for each in words.values())


def test_numbers_are_listed_as_a_person_says_them(js: Script) -> None:
    for numbers, text in (
        ([3], "3"),
        ([0, 1, 2, 5], "0–2 and 5"),
        ([4, 1, 6], "1, 4 and 6"),
        ([1, 2], "1 and 2"),
        ([], ""),
    ):
        assert js("listed(numbers)", numbers=numbers) == text


def test_missing_ranks_are_named(js: Script) -> None:
    named = {"missing": {"never started": [5], "elsewhere": [8, 9, 10]}, "left_out": 2}
    assert js("missingWords(named)", named=named) == (
        "Rank 5 never started, or is not watched. Ranks 8–10 are recorded in another folder, if at "
        "all: hosts that share no disk have one each. 2 more ranks are recorded and not shown."
    )
    assert js("missingWords(named)", named={"missing": {}, "left_out": 0}) == ""


def test_colors_are_of_the_values_but_for_the_slowest(js: Script) -> None:
    steady = [[1.0, 1.02]] * 60
    assert js("colorRange(cells, 'perf/step_time')", cells=steady) == {
        "low": pytest.approx(0.714),
        "high": 1.02,
        "over": False,
    }
    first_slow = [[50.0, 50.0], *steady]
    found = js("colorRange(cells, 'perf/step_time')", cells=first_slow)
    assert (found["high"], found["over"]) == (1.02, True)
    assert js("colorRange(cells, 'gpu/util')", cells=steady)["high"] == 100
    assert js("colorRange(cells, 'perf/data_wait')", cells=steady)["low"] == 0
    assert js("colorRange(cells, 'x')", cells=[[None, None]]) is None
    flat = js("colorRange(cells, 'x')", cells=[[0, 0]])
    assert flat["high"] > flat["low"]


def test_as_many_rows_are_named_as_have_room_and_a_host_once(js: Script) -> None:
    named = {"ranks": [[n, n, n // 4, ""] for n in range(8)], "hosts": ["a", "<b>"]}
    labels = js("rowLabels(named, 5, new Set([2])).map(({text}) => text)", named=named)
    assert labels == ["a 0", "<b>▸ 2</b>", "3", "&lt;b> 4", "6"]
    one = {**named, "hosts": ["a"], "ranks": [[0, 7, 0, ""]]}
    assert js("rowLabels(named, 26, new Set())", named=one) == [{"row": 0, "text": "7"}]


def test_lines_of_picked_ranks_and_the_mean(js: Script) -> None:
    answer = NAMED | strip([[1, 2, 3], [3, 4, 5]], [0, 1], 5) | TABLE
    found = data(js, "rankLines(data, new Set([2]), true)", answer)
    assert [(line["label"], line["values"]) for line in found] == [
        ("rank 2", [3, 5]),
        ("mean", [2, 4]),
    ]
    line = {"xs": [0, 1, 2], "values": [5, 6, 7]}
    assert js("lineValueAt(line, 1.2, 1)", line=line) == 6
    assert js("lineValueAt(line, 9, 1)", line=line) is None


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([2.0, 4.0], 1.9, 4.1),
        ([0.001, 0.0311], 0, 0.0327),
        ([-2.0, 3.0], -2.25, 3.25),
        ([3.0, 3.0], 2.85, 3.15),
        ([0.0], 0, 0.05),
        ([], 0, 1),
        ([*[0.02] * 60, 5.0], 0.019, 0.021),  # a slow first step does not set the axis
        ([*[0.02] * 60, 0.03], 0.0195, 0.0305),
    ],
)
def test_the_axis_of_lines_holds_the_usual_values(
    js: Script, values: list[float], low: float, high: float
) -> None:
    found = js("lineRange([{values}])", values=values)
    assert found == pytest.approx([low, high], rel=0.06, abs=0.06 * (high - low))
    assert found[0] < found[1]


def test_the_state_stands_behind_the_rank(js: Script) -> None:
    assert js("COLUMNS.map(([key]) => key)")[:2] == ["rank", "state"]
