"""The live chart's JavaScript without DOM (buckets, points, texts, state), run in Node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dashboard.charts.chart_spec import COLORS, GPU_COLORS, LINES
from stepscope.store.blocks import SeriesBlock, merge
from tests.support.javascript import Script, js

__all__ = ["js"]

Values = list[float | None]


def part(first: int, values: Values, bucket: int = 1, **more: Any) -> dict[str, Any]:
    """Return one series of an answer: bucket i has mean values[i], min one less, max one more."""
    ends = [first + (index + 1) * bucket - 1 for index in range(len(values))]
    column: dict[str, Any] = {"mean": values}
    if bucket > 1:
        column["min"] = [None if value is None else value - 1 for value in values]
        column["max"] = [None if value is None else value + 1 for value in values]
        column["count"] = [0 if value is None else bucket for value in values]
    return {
        "first": first,
        "bucket": bucket,
        "end": first + len(values) * bucket,
        "reset": False,
        "t": [end / 10 for end in ends],
        "s": ends,
        "v": {"a": column | more.pop("column", {})},
        **more,
    }


# --- series: merging of answers -------------------------------------------------------------------

MERGE = "parts.reduce((held, part) => mergeSeries(held, part), null)"


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        ([part(0, [1.0, 2.0]), part(2, [3.0])], [1, 2, 3]),
        ([part(0, [1.0, 2.0], 4), part(4, [9.0], 4)], [1, 9]),  # the unfinished bucket is replaced
        ([part(0, [1.0, 2.0], 4), part(4, [2.5, 7.0], 4)] * 2, [1, 2.5, 7]),  # idempotent
        ([part(0, [1.0, 2.0]), part(0, [7.0], reset=True)], [7]),
    ],
)
def test_answers_merge(js: Script, parts: list[Any], mean: list[float]) -> None:
    merged = js(MERGE, parts=parts)
    assert merged["v"]["a"]["mean"] == mean
    cursor = f"steps~{parts[-1]['end']}~{parts[0]['bucket']}"
    assert js(f"cursorText({{steps: {MERGE}}})", parts=parts) == cursor


def test_a_larger_bucket_merges_the_buckets_before(js: Script) -> None:
    merged = js(MERGE, parts=[part(0, [1.0, 3.0, None, 5.0]), part(4, [8.0], 2)])
    assert (merged["bucket"], merged["start"], merged["s"]) == (2, [0, 2, 4], [1, 3, 5])
    nothing = [None, None, None]
    column = {"mean": [2, 5, 8], "min": [1, 5, 7], "max": [3, 5, 9]}
    column |= {"count": [2, 1, 2], "odd": nothing}
    assert merged["v"]["a"] == column


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (2, 4, 8)])
def test_buckets_with_missing_values_merge_as_on_the_server(
    js: Script, sizes: tuple[int, ...]
) -> None:
    values = [0.0, 0.0, 3.0, None, None, None, 9.0, 2.0, None, 4.0]
    row = np.array([[np.nan if value is None else value for value in values]])
    at = np.arange(len(values), dtype=float)
    server = SeriesBlock.raw(("a",), at, at, row)
    browser = MERGE
    for size in sizes:
        server = merge(server, np.flatnonzero(np.diff(server.ts // size, prepend=-1)))
        browser = f"coarsen({browser}, {size})"
    found = js(browser, parts=[part(0, values)])["v"]["a"]
    for stat, wanted in (("mean", server.mean), ("min", server.low), ("max", server.high)):
        assert found[stat] == pytest.approx(wanted[0])
    assert found["count"] == server.count[0].tolist()


def test_the_mean_of_a_run_counts_values_and_not_buckets(js: Script) -> None:
    column = {"mean": [10.0, 40.0], "min": [0.0, 40.0], "max": [20.0, 40.0], "count": [2, 1]}
    steps = part(0, [10.0, 40.0], 2, column=column)
    assert tile(js, {"unit": "%", "ended": "mean"}, {"steps": steps}, ended=True)["text"] == [
        "20%",
        "mean",
    ]


def test_a_metric_that_appears_later_is_missing_before_and_after(js: Script) -> None:
    late = part(2, [3.0]) | {"v": {"b": {"mean": [5.0]}}}
    merged = js(MERGE, parts=[part(0, [1.0, 2.0]), late, part(3, [4.0])])
    means = [merged["v"][key]["mean"] for key in "ab"]
    assert means == [[1, 2, None, 4], [None, None, 5, None]]


def test_at_most_500_buckets_keep_all_extremes(js: Script) -> None:
    values: Values = [float(index % 7) for index in range(1999)]
    values[777] = 99.0
    parts = [part(start, values[start : start + 37]) for start in range(0, 1999, 37)]
    merged = js(MERGE, parts=parts)
    assert (merged["bucket"], len(merged["start"]), merged["end"]) == (4, 500, 1999)
    assert max(merged["v"]["a"]["max"]) == 99


def test_values_that_are_not_finite_stay_at_their_place_and_are_counted(js: Script) -> None:
    odd = part(2, [None, None], column={"odd": ["NaN", "-Infinity"]})
    parts = [part(0, [1.0, 2.0]), odd, part(4, [5.0])]
    merged = js(MERGE, parts=parts)["v"]["a"]
    assert merged["mean"] == [1, 2, None, None, 5]
    assert merged["odd"] == [None, None, "NaN", "-Infinity", None]
    coarse = js(f"coarsen({MERGE}, 4)", parts=parts)["v"]["a"]
    assert (coarse["mean"], coarse["odd"]) == ([1.5, 5], [2, None])
    assert js(f"coarsen(coarsen({MERGE}, 2), 8)", parts=parts)["v"]["a"]["odd"] == [2]


# --- points of lines, values, texts ---------------------------------------------------------------


def test_a_line_breaks_where_values_are_missing_for_long(js: Script) -> None:
    times = [*(index / 10 for index in range(40)), 13.0]  # 10 Hz, then one after nine seconds
    line = "linePoints(times, times, null, 1, clock ? times : null).y"
    assert js(line, times=times, clock=True)[-3:] == [3.9, None, 13]
    assert None not in js(line, times=times, clock=False)


ODD = {key: [1, None, None, 4] for key in ("mean", "min", "max")}
ODD["odd"] = [None, None, "NaN", None]
SPANS = {
    "odd": [None, "NaN", None, "NaN", None, "Infinity", 3, None],
    "mean": [1.0, None, None, None, 2.0, None, 2.0, None],
}
TIMED = "{v: {'perf/step_time': {mean: [9, 9, ...new Array(10).fill(.5)]}}}"


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("linePoints([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1.5, 2.5], 1).x", [1, 2, 3]),
        # A validation has the step of the row before.
        ("linePoints([0, 1, 2, 2], [null, null, null, 9], [0, 2], 1)", {"x": [2], "y": [9]}),
        ("linePoints([0, 1, 2, 3], odd.mean, null, 1, null, odd.odd).y", [1, None, 4]),
        ("bandPoints([0, 1, 2, 3], odd, null, 1).y", [1, 1, None, 4, 4]),
        ("bandPoints([0, 1, 2], {min: [0, 1, 4], max: [2, 2, 4]}, null, 1).y", [2, 2, 4, 4, 1, 0]),
        (
            "oddSpans([0, 1, 2, 3, 4, 5, 6, 7], spans, null)",
            [{"from": 1, "to": 3, "word": "NaN"}, {"from": 5, "to": 6, "word": "inf"}],
        ),
        ("ema([4, 4, null, 4], 0.5)", [4, 4, None, 4]),  # no start bias
        ("ema([0, 1], 0.5)[1]", 2 / 3),
        (f"secondsLeft({TIMED}, {{step: 100, total_steps: 200}})", 50.0),
        (f"secondsLeft({TIMED}, {{step: 100, total_steps: null}})", None),
        ("change('a', 'B', null, 2 ** 20)", "a n/a → 1.00 MiB"),
        ("[withUnit(0.0211, 's'), withUnit(0.0189, 'TFLOP/s')]", ["21.1 ms", "18.9 GFLOP/s"]),
        ("latestEver({v: {a: {odd: [null, 'NaN'], mean: [3, null]}}}, 'a')", "NaN"),
    ],
)
def test_values_and_texts(js: Script, expression: str, found: Any) -> None:
    value = js(expression, odd=ODD, spans=SPANS)
    assert value == (pytest.approx(found) if isinstance(found, float) else found)


def test_the_header_shows_the_progress_of_the_run(js: Script) -> None:
    steps = {"t": [83.0], "s": [2244], "v": {"perf/step_time": {"mean": [0.5] * 10}}}
    progress = {"step": 2244, "total_steps": 30600, "epoch": 3, "epochs": 40}
    answer = {"progress": progress, "now": 90}
    known = {"answer": answer, "live": {"steps": steps}, "ended": False}
    text = "step 2,244 of 30,600 · 7%"
    assert js("progressOf(known).text", known=known) == f"{text} · 3:56:18 left"
    for still in (known | {"ended": True}, known | {"answer": answer | {"status": "paused"}}):
        assert js("progressOf(known).text", known=still) == text
    unknown = {"answer": {"progress": {}, "now": 5}, "live": {}, "ended": False}
    assert js("progressOf(known)", known=unknown) == {"share": None, "text": ""}


# --- tiles ----------------------------------------------------------------------------------------

LOSS = {"id": "loss", "series": ["steps"], "metric": "a", "unit": ""}
LIVE = "Object.fromEntries(Object.entries(parts).map(([k, p]) => [k, mergeSeries(null, p)]))"


def tile(js: Script, spec: dict[str, Any], parts: dict[str, Any], ended: bool = False) -> Any:
    return js(f"tileContent(spec, {LIVE}, ended)", spec=LOSS | spec, parts=parts, ended=ended)


@pytest.mark.parametrize(
    ("steps", "spec", "ended", "text"),
    [
        ({"last": {"a": "NaN"}}, {}, False, ["NaN", ""]),
        ({"last": {"a": 2.0}}, {"also": ["a", "b"]}, False, ["2.000", "val 0.00"]),
        ({}, {"unit": "%", "ended": "mean"}, False, ["0%", ""]),
        ({}, {"unit": "%", "ended": "mean"}, True, ["57%", "mean"]),  # not the last reading
        ({}, {"unit": "1/s", "ended": "mean", "scale": 4}, True, ["227", "mean"]),  # four ranks
        ({}, {"unit": "1/s", "ended": "mean", "whole": 50, "scale": 4}, True, ["200", "mean"]),
    ],
)
def test_a_tile(js: Script, steps: Any, spec: Any, ended: bool, text: list[str]) -> None:
    assert tile(js, spec, {"steps": part(0, [90, 80, 0], **steps)}, ended)["text"] == text


def test_a_tile_of_several_gpus_has_their_mean_and_range(js: Script) -> None:
    values = ([10.0, 37.0], [30.0, 98.0], [None])
    parts = {f"d/{n}": part(0, each, last={"a": each[-1]}) for n, each in enumerate(values)}
    spec = LOSS | {"series": list(parts), "unit": "%", "hide": False}
    assert tile(js, spec, parts)["text"] == ["68%", "37–98% on 2 of 3 GPUs"]
    none = tile(js, spec | {"metric": "b", "reason": "why"}, {})
    assert (none["text"], none["reason"], none["drawn"]) == (["n/a", ""], "why", False)


# --- events, marks and alerts ---------------------------------------------------------------------


def epochs(count: int, kind: str = "epoch") -> list[dict[str, Any]]:
    text = "Epoch {0}: validation loss 0.0{0}"
    return [
        {"id": n, "step": n, "epoch": n, "kind": kind, "text": text.format(n)}
        for n in range(1, count + 1)
    ]


def alert(number: int, rule: str, state: str = "raised", **data: Any) -> dict[str, Any]:
    about = {"rule": rule, "state": state, "level": "warning"} | data
    return {"id": number, "step": number, "kind": "alert", "text": rule, "data": about}


def test_marks_are_thinned_but_actions_stay(js: Script) -> None:
    events = [*epochs(100), {"id": 101, "step": 55, "epoch": 55, "kind": "mark"}]
    marks = js("marksIn(events, 'step', [0, 100])", events=events)
    assert [mark["x"] for mark in marks] == [*range(10, 101, 10), 55]


def test_alerts_that_were_raised_and_not_cleared_are_active(js: Script) -> None:
    events = [
        *(alert(1, "hot", uuid="GPU-a"), alert(2, "hot", uuid="GPU-b"), alert(3, "no_step")),
        *(alert(4, "hot", "cleared", uuid="GPU-a"), alert(5, "no_step", "cleared")),
        *(alert(6, "no_step"), {"id": 7, "kind": "alert", "text": "of another program"}),
        {"id": 8, "kind": "nan", "data": {"rule": "x"}},
    ]
    assert js("activeAlerts(events).map(({id}) => id)", events=events) == [2, 6, 7]


@pytest.mark.parametrize(
    ("event", "word", "tone", "label"),
    [
        (alert(1, "x", level="critical"), "Alert: Critical", "bad", "alert"),
        (alert(1, "x", level="<b>"), "Alert: Warning", "bad", "alert"),
    ],
)
def test_an_alert_is_in_the_events_with_its_level(
    js: Script, event: dict[str, Any], word: str, tone: str, label: str
) -> None:
    found = "[rowsOf([event])[0].word, toneOf(event),"
    found += " marksIn([event], 'step', [0, 9])[0].label]"
    assert js(found, event=event) == [word, tone, label]


# --- state: axis, zoom, commands, polls -----------------------------------------------------------


def store(js: Script, result: str, *calls: str, **given: Any) -> Any:
    """Return an expression of a store after these calls of its methods."""
    script = "; ".join(f"store.{call}" for call in calls)
    made = "const store = new Store(() => {}); store.open('x')"
    return js(f"(() => {{ {made}; {script}; return {result}; }})()", **given)


SAMPLED = {"samples": {"t": [0, 5, 10], "s": [0, 0, 0]}}
STEPPED = SAMPLED | {"steps": {"t": [6, 10], "s": [1, 401]}}
BOTH = STEPPED | {"samples": {"t": [0, 6, 10], "s": [0, 1, 401]}}
IN_TIME = {"zoom": [2, 4], "zoomAxis": "time"}
IN_STEPS = {"zoom": [1, 201], "zoomAxis": "step"}


@pytest.mark.parametrize(
    ("live", "prefs", "call", "axis", "shown"),
    [
        (STEPPED, {}, "ended", "step", [1, 401]),
        (SAMPLED, IN_TIME, "ended", "time", [2, 4]),
        (STEPPED, IN_TIME, "ended", "step", [1, 401]),  # zoomed on the other axis
        (BOTH, IN_STEPS, "chooseAxis('time')", "time", [0, 10]),
    ],
)
def test_the_axis_and_its_shown_part(
    js: Script, live: Any, prefs: Any, call: str, axis: str, shown: list[float]
) -> None:
    calls = ("live = live", "prefs = {...store.prefs, ...prefs}", call)
    assert store(js, "[store.axis, store.range]", *calls, live=live, prefs=prefs) == [axis, shown]


PRESS = "ask(5, 'pause', 'Pause: sent.')"
ADVICE = "settle(6, 'use Force stop', 'done', 'stop')"
ERROR = "setHeader({error: {id: 1, text: 'no'}, trouble: null})"


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ([PRESS, "settle(4, 'an older one', 'done')"], ["Pause: sent.", "waiting", "pause"]),
        ([PRESS, "settle(5, 'done', 'done')"], ["done", "done", None]),
        ([PRESS, "open('other')"], [None, None, None]),
        ([ERROR, "settle(7, 'later', 'done')", ERROR], ["later", "done", None]),  # shown once
        ([ADVICE, "take({status: 'running', series: {}})"], ["use Force stop", "done", None]),
        ([ADVICE, "take({status: 'stopped', series: {}})"], [None, None, None]),
    ],
)
def test_the_header_shows_the_last_command(js: Script, calls: list[str], shown: Any) -> None:
    command = "[store.shownCommand?.text, store.shownCommand?.tone, store.waitingFor]"
    assert store(js, command, *calls) == shown


def test_an_event_is_new_once(js: Script) -> None:
    answers = [
        {"series": {}, "events": [alert(1, "a"), alert(2, "b")]},
        {"series": {}, "events": [alert(2, "b"), alert(3, "c")]},
    ]
    taken = "answers.map((answer) => store.take(answer).map(({id}) => id))"
    result = f"[{taken}, store.question().events, store.events.length]"
    assert store(js, result, answers=answers) == [[[1, 2], [3]], 3, 3]


# --- colors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_metric_has_a_color(js: Script, theme: str) -> None:
    named = {*COLORS.values(), *LINES, *GPU_COLORS}
    assert named == set(js(f"PALETTES.{theme}"))
