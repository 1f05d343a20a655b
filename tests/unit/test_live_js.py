"""The live chart's pure JavaScript (buckets, points, texts), run in Node."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dashboard.charts.chart_spec import COLORS, GPU_COLORS
from stepscope.memory.breakdown import CATEGORIES
from tests.support.javascript import Script, js

__all__ = ["js"]


def part(first: int, values: list[float | None], bucket: int = 1, **more: Any) -> dict[str, Any]:
    """One series of an answer: bucket i has mean values[i], minimum one less, maximum one more."""
    ends = [first + (index + 1) * bucket - 1 for index in range(len(values))]
    column: dict[str, Any] = {"mean": values}
    if bucket > 1:
        column["min"] = [None if value is None else value - 1 for value in values]
        column["max"] = [None if value is None else value + 1 for value in values]
    return {
        "first": first,
        "bucket": bucket,
        "end": first + len(values) * bucket,
        "reset": False,
        "t": [end / 10 for end in ends],
        "s": ends,
        "v": {"a": column},
        **more,
    }


MERGE = "parts.reduce((held, part) => mergeSeries(held, part), null)"


def test_rows_are_appended_and_the_cursor_names_what_was_consumed(js: Script) -> None:
    parts = [part(0, [1.0, 2.0]), part(2, [3.0])]
    merged = js(MERGE, parts=parts)
    assert merged["v"]["a"]["mean"] == [1, 2, 3]
    assert merged["start"] == [0, 1, 2]
    assert js(f"cursorText({{steps: {MERGE}}})", parts=parts) == "steps~3~1"


def test_the_same_answer_twice_changes_nothing(js: Script) -> None:
    parts = [part(0, [1.0, 2.0], 4), part(4, [2.5, 7.0], 4)]
    assert js(MERGE, parts=parts) == js(MERGE, parts=[*parts, parts[-1]])


def test_the_unfinished_bucket_is_replaced(js: Script) -> None:
    merged = js(MERGE, parts=[part(0, [1.0, 2.0], 4), part(4, [9.0], 4)])
    assert merged["v"]["a"]["mean"] == [1, 9]


def test_a_larger_bucket_merges_what_is_held(js: Script) -> None:
    merged = js(MERGE, parts=[part(0, [1.0, 3.0, None, 5.0]), part(4, [8.0], 2)])
    assert merged["bucket"] == 2
    assert merged["start"] == [0, 2, 4]
    assert merged["v"]["a"] == {
        "mean": [2, 5, 8],
        "min": [1, 5, 7],
        "max": [3, 5, 9],
        "odd": [None, None, None],
    }
    assert merged["s"] == [1, 3, 5]


def test_a_reset_drops_what_is_held(js: Script) -> None:
    merged = js(MERGE, parts=[part(0, [1.0, 2.0]), part(0, [7.0], reset=True)])
    assert merged["v"]["a"]["mean"] == [7]


def test_a_metric_that_appears_later_is_missing_before_and_after(js: Script) -> None:
    late = part(2, [3.0])
    late["v"] = {"b": {"mean": [5.0]}}
    merged = js(MERGE, parts=[part(0, [1.0, 2.0]), late, part(3, [4.0])])
    assert merged["v"]["a"]["mean"] == [1, 2, None, 4]
    assert merged["v"]["b"]["mean"] == [None, None, 5, None]


def test_no_more_than_500_buckets_and_no_extreme_lost(js: Script) -> None:
    values = [float(index % 7) for index in range(1999)]
    values[777] = 99.0
    parts = [part(start, values[start : start + 37]) for start in range(0, 1999, 37)]
    merged = js(MERGE, parts=parts)
    assert merged["bucket"] == 4
    assert len(merged["start"]) == 500
    assert max(merged["v"]["a"]["max"]) == 99
    assert merged["end"] == 1999


def test_a_line_bridges_slow_sensors_and_breaks_where_values_are_missing_for_long(
    js: Script,
) -> None:
    line = "linePoints([0, 1, 2, 3], [1, null, 3, 4], null, 1, times)"
    assert js(line, times=[0, 0.5, 1, 1.5]) == {"x": [0, 2, 3], "y": [1, 3, 4]}
    # 40 values at 10 Hz, then nothing for nine seconds, then one more.
    times = [index / 10 for index in range(40)] + [13.0]
    values = [float(index) for index in range(41)]
    points = js("linePoints(times, values, null, 1, times)", times=times, values=values)
    assert points["y"][-3:] == [39, None, 40]
    assert (
        None not in js("linePoints(times, values, null, 1, null)", times=times, values=values)["y"]
    )


def odd_part(first: int, values: list[float | None], odd: list[str | int | None]) -> dict[str, Any]:
    """One series of an answer with values that are no finite numbers."""
    made = part(first, values)
    made["v"]["a"]["odd"] = odd
    return made


def test_values_that_are_not_finite_are_kept_where_they_were_and_counted(js: Script) -> None:
    parts = [part(0, [1.0, 2.0]), odd_part(2, [None, None], ["NaN", "-Infinity"]), part(4, [5.0])]
    merged = js(MERGE, parts=parts)["v"]["a"]
    assert merged["mean"] == [1, 2, None, None, 5]
    assert merged["odd"] == [None, None, "NaN", "-Infinity", None]
    coarse = js(f"coarsen({MERGE}, 4)", parts=parts)["v"]["a"]
    assert (coarse["mean"], coarse["odd"]) == ([1.5, 5], [2, None])
    assert js(f"coarsen(coarsen({MERGE}, 2), 8)", parts=parts)["v"]["a"]["odd"] == [2]


def test_a_line_breaks_where_a_value_was_not_finite(js: Script) -> None:
    parts = [odd_part(0, [1.0, None, None, 4.0], [None, None, "NaN", None])]
    column = f"{MERGE}.v.a"
    line = f"linePoints([0, 1, 2, 3], {column}.mean, null, 1, null, {column}.odd)"
    assert js(line, parts=parts) == {"x": [0, 0, 3], "y": [1, None, 4]}
    band = f"bandPoints([0, 1, 2, 3], {column}, null, 1, null)"
    assert js(band, parts=parts) == {"x": [0, 0, 3, 3, 3], "y": [1, 1, None, 4, 4]}


def test_stretches_that_are_not_finite_end_at_the_next_finite_value(js: Script) -> None:
    odd = [None, "NaN", None, "NaN", None, "Infinity", 3, None]
    mean = [1.0, None, None, None, 2.0, None, 2.0, None]
    spans = js("oddSpans([0, 1, 2, 3, 4, 5, 6, 7], {odd, mean}, null)", odd=odd, mean=mean)
    assert spans == [{"from": 1, "to": 3, "word": "NaN"}, {"from": 5, "to": 6, "word": "inf"}]
    assert js("oddSpans([0, 5], {odd: [3, 3], mean: [1, 1]}, null)")[0]["word"] == "NaN/inf"


def tile(js: Script, last: Any, since: dict[str, int], spec: dict[str, Any] | None = None) -> Any:
    """The words of a tile for the loss whose newest value is `last`, after finite ones."""
    series = {**part(0, [3.0, 2.0]), "last": {"a": last}, "since": since}
    spec = {"id": "loss", "series": ["steps"], "metric": "a", "unit": "", **(spec or {})}
    shown = "tileContent(spec, {steps: mergeSeries(null, series)}).text"
    return js(shown, series=series, spec=spec)


def test_a_tile_says_since_when_a_value_is_not_finite(js: Script) -> None:
    assert tile(js, "NaN", {"a": 1234}) == ["NaN", "since step 1,234"]
    assert tile(js, "-Infinity", {"a": 2}) == ["−inf", "since step 2"]
    assert tile(js, 2.0, {}) == ["2.000", ""]


def test_a_validation_that_is_not_finite_is_no_older_number(js: Script) -> None:
    also = {"also": ["a", "b"]}
    assert tile(js, 2.0, {}, also)[1] == "val 2.00"
    values = {"odd": [None, "NaN"], "mean": [3.0, None]}
    assert js("latestEver({v: {a: values}}, 'a')", values=values) == "NaN"
    assert js("latestEver({v: {a: values}}, 'a')", values={**values, "mean": [3.0, 1.0]}) == 1


def test_marks_are_thinned_to_a_few_epochs_but_actions_stay(js: Script) -> None:
    events = [{"id": n, "step": n, "epoch": n, "kind": "epoch"} for n in range(1, 101)]
    events.append({"id": 101, "step": 55, "epoch": 55, "kind": "mark"})
    marks = js("marksIn(events, 'step', [0, 100])", events=events)
    assert [mark["x"] for mark in marks] == [*range(10, 101, 10), 55]
    near = js("marksIn(events, 'step', [41, 50])", events=events)
    assert [mark["label"] for mark in near] == [f"e{n}" for n in range(41, 51)]


def test_marks_of_a_kind_in_one_place_are_one(js: Script) -> None:
    events = [{"id": n, "step": n, "kind": "amp_skipped"} for n in range(500)]
    events.append({"id": 500, "step": 499, "kind": "oom"})
    steps = [mark["x"] for mark in js("marksIn(events, 'step', [0, 1000])", events=events)]
    assert steps[-2:] == [499, 499]
    assert len(steps) == 7
    assert min(b - a for a, b in pairwise(steps[:-1])) > 80


def many_epochs(count: int, kind: str = "epoch") -> list[dict[str, Any]]:
    return [
        {"id": n, "epoch": n, "kind": kind, "text": f"Epoch {n}: validation loss 0.0{n}"}
        for n in range(1, count + 1)
    ]


def test_many_epochs_are_one_line_of_the_table_and_their_own_group_lists_them(js: Script) -> None:
    done = {"id": 900, "kind": "empty_cache", "text": "Empty cache", "data": {"command_id": 3}}
    events = [*many_epochs(31), done]
    rows = js("rowsOf(events, 'all')", events=events)
    assert [row["word"] for row in rows] == ["Empty cache", "Epochs 1–31"]
    assert rows[1]["text"] == "last: validation loss 0.031"
    newest, *others = js("rowsOf(events, 'epochs')", events=events)
    assert (newest["word"], newest["text"]) == ("Epoch", "Epoch 31: validation loss 0.031")
    assert len(others) == 30
    assert len(js("rowsOf(events, 'all')", events=many_epochs(3))) == 3, "few stay as they are"
    saved = js("rowsOf(events, 'all')", events=many_epochs(7, "checkpoint"))
    assert [row["word"] for row in saved] == ["Checkpoint × 7"]


@pytest.mark.parametrize(
    ("event", "group"),
    [
        ({"kind": "mark"}, "commands"),
        ({"kind": "save_checkpoint", "data": {"command_id": 1}}, "commands"),
        ({"kind": "oom"}, "failures"),
        ({"kind": "checkpoint", "data": {"ok": False}}, "failures"),
        ({"kind": "checkpoint", "data": {"ok": True}}, "epochs"),
        ({"kind": "gpu_recovered"}, "other"),
    ],
)
def test_each_event_is_in_one_group(js: Script, event: dict[str, Any], group: str) -> None:
    for name in js("['commands', 'failures', 'epochs', 'other']"):
        assert len(js("rowsOf([event], name)", event=event, name=name)) == (name == group)


def gpu_part(values: list[float | None], **more: Any) -> dict[str, Any]:
    made = part(0, values, **more)
    return {**made, "last": {"a": values[-1]}, "odd": {}}


def test_the_tile_of_an_ended_run_is_the_mean_or_the_peak_of_the_run(js: Script) -> None:
    """A finished run showed its last reading: utilization 0%."""
    part = {"bucket": 1, "first": 0, "end": 3, "reset": True, "t": [1, 2, 3], "s": [1, 2, 3]}
    part["v"] = {"u": {"mean": [90, 80, 0]}}
    spec = {"series": ["samples"], "metric": "u", "unit": "%", "ended": "mean"}

    def shown(spec: dict[str, Any], ended: bool) -> Any:
        live = "{samples: mergeSeries(null, part)}"
        return js(f"tileContent(spec, {live}, ended).text", spec=spec, part=part, ended=ended)

    assert shown(spec, False) == ["0%", ""]
    assert shown(spec, True) == ["57%", "mean"]
    memory = spec | {"unit": "B", "ended": "peak"}
    assert shown(memory, True) == ["90.0", "B · peak"]
    assert shown(spec | {"unit": "", "ended": "last"}, True)[0] == "0"
    all_ranks = spec | {"unit": "1/s", "ended": "mean", "scale": 4}
    assert shown(all_ranks, True)[0] == "227"


def test_a_tile_of_several_gpus_has_their_mean_and_range(js: Script) -> None:
    parts = {"d/0": gpu_part([10.0, 37.0]), "d/1": gpu_part([30.0, 98.0]), "d/2": gpu_part([None])}
    live = "Object.fromEntries(Object.entries(parts).map(([k, p]) => [k, mergeSeries(null, p)]))"
    spec = {"series": list(parts), "metric": "a", "unit": "%", "hide": False}
    shown = js(f"tileContent(spec, {live})", spec=spec, parts=parts)
    assert shown["text"] == ["68%", "37–98% on 2 of 3 GPUs"]
    both = {**spec, "series": ["d/0", "d/1"], "unit": "W"}
    assert js(f"tileContent(spec, {live})", spec=both, parts=parts)["text"] == ["68", "W · 37–98"]
    ends = js(f"sparkPath(spec, {live})", spec=spec, parts=parts)
    assert ends == "M0.0 18.0L100.0 2.0"  # from a mean of 20 to one of 67.5
    none = js(f"tileContent(spec, {live})", spec={**spec, "metric": "b", "reason": "why"}, parts={})
    assert (none["text"], none["reason"], none["drawn"]) == (["n/a", ""], "why", False)


def test_a_row_of_heat_has_the_mean_of_each_cell_and_no_heat_in_a_gap(js: Script) -> None:
    row = "heatRow(xs, values, [0, 8], cells, times)"
    xs = [0, 1, 2, 3, 8]
    values = [10, 30, None, 50, 90]
    assert js(row, xs=xs, values=values, cells=4, times=[0, 1, 2, 3, 4]) == [20, 50, 50, 90]
    assert js(row, xs=xs, values=values, cells=4, times=[0, 1, 2, 3, 99]) == [20, 50, None, 90]
    # Zoomed in between two values the earlier one counts.
    part = "heatRow([0, 10], [7, 9], [2, 6], 4, null)"
    assert js(part) == [7, 7, 7, 7]


def test_the_newest_values_of_folded_charts_are_said(js: Script) -> None:
    lines = [{"series": f"d/{n}", "metric": "gpu/power", "style": "mean"} for n in range(2)] + [
        {"series": "d/0", "metric": "gpu/power_limit", "style": "context"}
    ]
    live = {f"d/{n}": {"last": {"gpu/power": 300 + n * 100}, "v": {}} for n in range(2)}
    metrics = {"gpu/power": {"label": "power", "unit": "W"}}
    assert js("newestWords(lines, live, metrics)", lines=lines, live=live, metrics=metrics) == [
        "power 350 W"
    ]


def test_a_band_goes_round_the_minimum_and_the_maximum_of_every_bucket(js: Script) -> None:
    column = {"min": [0, 1, 4], "max": [2, 2, 4]}
    points = js("bandPoints([0, 1, 2], column, null, 1, null)", column=column)
    assert points == {"x": [0, 1, 2, 2, 1, 0], "y": [2, 2, 4, 4, 1, 0]}


def test_a_constant_line_costs_two_points(js: Script) -> None:
    points = js("linePoints([0, 1, 2, 3], [5, 5, 5, 5], null, 1, null)")
    assert points == {"x": [0, 3], "y": [5, 5]}


def test_only_the_visible_span_is_drawn_and_one_point_beyond(js: Script) -> None:
    points = js("linePoints([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [1.5, 3.5], 1, null)")
    assert points["x"] == [1, 2, 3, 4]


def test_a_validation_at_the_very_edge_is_drawn(js: Script) -> None:
    points = js("linePoints([0, 1, 2, 2], [null, null, null, 9], [0, 2], 1, null)")
    assert points == {"x": [2], "y": [9]}


def test_smoothing_has_no_start_bias_and_keeps_gaps(js: Script) -> None:
    assert js("ema([4, 4, null, 4], 0.9)") == pytest.approx([4, 4, None, 4])
    assert js("ema([0, 1], 0.5)") == pytest.approx([0, 2 / 3])


def test_steps_and_times_convert_both_ways(js: Script) -> None:
    series = {"t": [0, 10, 20], "s": [0, 100, 400]}
    assert js("convertX(series, 'time', 250)", series=series) == 15
    assert js("convertX(series, 'step', 5)", series=series) == 50
    assert js("convertX(series, 'time', 900)", series=series) == 20


def test_the_time_left_follows_the_mean_step_time(js: Script) -> None:
    steps = {"v": {"perf/step_time": {"mean": [9.0, 9.0] + [0.5] * 10}}}
    left = "secondsLeft(steps, {step: 100, total_steps: total})"
    assert js(left, steps=steps, total=200) == pytest.approx(50)
    assert js(left, steps=steps, total=None) is None


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("bytesOf(12.3 * 2 ** 30, 80 * 2 ** 30).join(' ')", "12.3 GiB of 80.0 (15%)"),
        ("bytesOf(40 * 2 ** 20, 80 * 2 ** 30).join(' ')", "40.0 MiB of 80.0 GiB (0.05%)"),
        ("bytesOf(0, 80 * 2 ** 30).join(' ')", "0 B of 80.0 GiB (0%)"),
        ("bytesOf(2 ** 30, null).join('|')", "1.00|GiB"),
        ("change('reserved', 'B', 2.1 * 2 ** 30, .81 * 2 ** 30)", "reserved 2.10 → 0.81 GiB"),
        ("change('a', 'B', null, 2 ** 20)", "a n/a → 1.00 MiB"),
        ("withUnit(0, '%')", "0%"),
        ("withUnit(null, 'W')", "n/a"),
        ("withUnit(0.0211, 's')", "21.1 ms"),
        ("withUnit(311.6, 'W')", "312 W"),
        ("withUnit(0.31256, '')", "0.3126"),
        ("clock(11045)", "3:04:05"),
        ("clock(41)", "0:41"),
    ],
)
def test_texts(js: Script, expression: str, text: str) -> None:
    assert js(expression) == text


def test_time_ticks_are_round_and_few(js: Script) -> None:
    ticks = js("timeTicks(0, 610, 5)")
    assert ticks == {"values": [0, 300, 600], "text": ["0:00", "5:00", "10:00"]}


AXIS = """(() => {
  const store = new Store(() => {});
  store.prefs = { ...store.prefs, ...prefs };
  store.live = live;
  return store;
})()"""
SAMPLED = {"samples": {"t": [0, 5, 10], "s": [0, 0, 0]}}
STEPPED = {**SAMPLED, "steps": {"t": [6, 10], "s": [1, 401]}}


def test_before_the_first_step_the_axis_is_time(js: Script) -> None:
    assert js(f"{AXIS}.axis", prefs={}, live=SAMPLED) == "time"
    assert js(f"{AXIS}.range", prefs={}, live=SAMPLED) == [0, 10]
    assert js(f"{AXIS}.axis", prefs={}, live=STEPPED) == "step"
    assert js(f"{AXIS}.range", prefs={}, live=STEPPED) == [1, 401]
    assert js(f"{AXIS}.range", prefs={}, live={}) == [0, 1]


def test_a_recording_has_time_only(js: Script) -> None:
    recording = f"(() => {{ const s = {AXIS}; s.setLayout({{axis: 'time'}}); return s.axis; }})()"
    assert js(recording, prefs={}, live=STEPPED) == "time"


def test_a_zoom_counts_on_the_axis_on_which_it_was_made(js: Script) -> None:
    zoomed = {"zoom": [2, 4], "zoomAxis": "time"}
    assert js(f"{AXIS}.range", prefs=zoomed, live=SAMPLED) == [2, 4]
    assert js(f"{AXIS}.range", prefs=zoomed, live=STEPPED) == [1, 401]
    chosen = f"(() => {{ const s = {AXIS}; s.chooseAxis('time'); return s.range; }})()"
    live = {**STEPPED, "samples": {"t": [0, 6, 10], "s": [0, 1, 401]}}
    by_step = {"zoom": [1, 201], "zoomAxis": "step"}
    assert js(chosen, prefs=by_step, live=live) == [6, 8]
    assert js(chosen, prefs={}, live=live) == [0, 10]


PAUSE = {"help": "Hold.", "when": {"pending": "no step yet.", "running": None}}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("running", {"refused": None, "title": "Hold."}),
        ("pending", {"refused": "no step yet.", "title": "Hold. Not now: no step yet."}),
        ("paused", None),
    ],
)
def test_a_button_is_drawn_for_the_status(js: Script, status: str, state: Any) -> None:
    assert js("buttonState(spec, status)", spec=PAUSE, status=status) == state


def commands(js: Script, *calls: str) -> Any:
    """What the header shows after these calls of the store's functions."""
    script = "; ".join(f"store.{call}" for call in calls)
    shown = "[store.command?.text, store.command?.tone, store.waitingFor]"
    return js(f"(() => {{ const store = new Store(() => {{}}); {script}; return {shown}; }})()")


def test_a_press_waits_until_its_own_answer(js: Script) -> None:
    press = "ask(5, 'pause', 'Pause: sent.')"
    assert commands(js, press) == ["Pause: sent.", "waiting", "pause"]
    assert commands(js, press, "settle(4, 'of before', 'done')")[1] == "waiting"
    assert commands(js, press, "settle(5, 'done', 'done')") == ["done", "done", None]
    assert commands(js, press, "settle(6, 'of another tab', 'done')")[0] == "of another tab"
    assert commands(js, press, "open('other')") == [None, None, None]


def test_what_a_stop_advises_goes_once_the_run_has_ended(js: Script) -> None:
    def told(status: str, kind: str) -> Any:
        return js(
            "(() => { const store = new Store(() => {}); store.open('x');"
            "store.settle(1, 'if it goes on, press Stop again', 'done', kind);"
            "store.take({status, series: {}}); return store.shownCommand?.text ?? null; })()",
            status=status,
            kind=kind,
        )

    advice = "if it goes on, press Stop again"
    assert told("running", "stop") == advice
    assert told("stopped", "stop") is None
    assert told("stopped", "checkpoint") == advice


def test_an_error_of_the_script_is_shown_once(js: Script) -> None:
    told = "setHeader({error: {id: 1, text: 'no'}, trouble: null})"
    assert commands(js, "ask(5, 'start', 'Starting')", told) == ["no", "refused", None]
    assert commands(js, told, "settle(7, 'later', 'done')", told)[0] == "later"


def test_the_header_says_how_far_the_run_is(js: Script) -> None:
    steps = {"t": [83.0], "s": [2244], "v": {"perf/step_time": {"mean": [0.5] * 10}}}
    progress = {"step": 2244, "total_steps": 30600, "epoch": 3, "epochs": 40}
    answer = {"answer": {"progress": progress, "now": 90}, "live": {"steps": steps}}
    text = "step 2,244 of 30,600 · 7% · 3:56:18 left"
    assert js("progressOf(known).text", known={**answer, "ended": False}) == text
    assert js("progressOf(known).text", known={**answer, "ended": True}) == text[:25]
    paused = {**answer, "ended": False, "answer": {**answer["answer"], "status": "paused"}}
    assert js("progressOf(known).text", known=paused) == text[:25], "no time passes"
    details = "epoch 3 of 40 · elapsed 1:30"
    assert js("detailsOf(known)", known={**answer, "ended": False}) == details
    # An ended run lasted as long as it recorded.
    assert js("detailsOf(known)", known={**answer, "ended": True})[-4:] == "1:23"
    unknown = {"answer": {"progress": {}, "now": 5}, "live": {}, "ended": False}
    assert js("progressOf(known)", known=unknown) == {"share": None, "text": ""}


@pytest.mark.parametrize(
    ("value", "text"), [(0.001, "0.001"), (3e-5, "0.00003"), (65536, "65536"), (0.95714, "0.9571")]
)
def test_a_learning_rate_is_short(js: Script, value: float, text: str) -> None:
    assert js(f"brief({value})") == text


SIGHTS = {  # linear RGB as seen with all cones, then without one of them (Machado et al., 2009)
    "normal": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def oklab(color: str, sight: str) -> NDArray[np.float64]:
    """Return #rrggbb as Oklab, in which distances are about as the eye sees them."""
    shares = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1)
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.63]])
    opponents = np.array(
        [[0.2105, 0.7936, -0.0041], [1.978, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    )
    return opponents @ np.cbrt(cones @ seen)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_gpus_are_told_apart_from_each_other_and_from_the_memory_lines(
    js: Script, theme: str, sight: str
) -> None:
    palette = js(f"PALETTES.{theme}")
    memory = [
        COLORS[key]
        for key in (
            "memory/allocated",
            "memory/reserved",
            "gpu/mem_used",
            "memory/peak_allocated",
            "gpu/mem_total",
        )
    ]
    for place, gpu in enumerate(GPU_COLORS):
        for other in [*memory, *GPU_COLORS[:place]]:
            apart = oklab(palette[gpu], sight) - oklab(palette[other], sight)
            wanted = 0.1 if sight == "normal" else 0.05
            assert np.linalg.norm(apart) > wanted, (gpu, other)


def test_every_mark_has_a_label_for_people(js: Script) -> None:
    kinds = js("Object.keys(EVENTS)")
    events = [{"id": n, "step": n, "epoch": 12, "kind": kind} for n, kind in enumerate(kinds)]
    labels = js("marksIn(events, 'step', [0, 99]).map(({label}) => label)", events=events)
    assert len(labels) == len(kinds)
    assert not any("_" in label for label in labels)


def test_a_marks_label_stays_inside_the_chart_and_touches_no_other(js: Script) -> None:
    labels = [["cache", 10], ["peaks", 30], ["e5", 60], ["gc", 125]]
    marks = "labels.map(([label]) => ({label, tone: 'action'}))"
    placed = js(f"placeLabels({marks}, labels.map(([, at]) => at), 130)", labels=labels)
    spans = {spot["mark"]["label"]: (spot["from"], spot["to"]) for spot in placed}
    assert set(spans) == {"peaks", "e5", "gc"}  # the newer of the first two
    assert spans["e5"][0] > 60  # on the right of its line
    assert spans["gc"][1] < 125  # there the axis stands


PARTS = ["ledger_" + name for name in ("parameters", "gradients", "optimizer", "activations")]
PARTS += ["ledger_" + name for name in ("cached", "split", "outside", "unnamed", "others")]
PARTS += ["ledger_driver", "ledger_free"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_neighbors_in_the_stack_of_the_ledger_can_be_told_apart(
    js: Script, theme: str, sight: str
) -> None:
    palette = js(f"PALETTES.{theme}")
    for lower, upper in pairwise(PARTS):
        apart = oklab(palette[lower], sight) - oklab(palette[upper], sight)
        assert np.linalg.norm(apart) > (0.1 if sight == "normal" else 0.07), (lower, upper)


def test_every_part_of_the_ledger_has_its_color_and_the_merged_ones_share_memorys(
    js: Script,
) -> None:
    wanted = {part.color for parts in CATEGORIES.values() for part in parts}
    for theme in ("light", "dark"):
        palette = js(f"PALETTES.{theme}")
        assert wanted <= set(palette)
        assert palette["ledger_whole"] == palette[COLORS["memory/allocated"]]
        assert palette["ledger_used"] == palette[COLORS["gpu/mem_used"]]
        assert palette["ledger_split"] == palette[COLORS["memory/reserved"]]


def stack(js: Script, columns: list[list[float | None]], **given: Any) -> Any:
    xs = given.pop("xs", list(range(len(columns[0]))))
    values = {"xs": xs, "columns": columns, "times": xs, "range": None} | given
    return js("stacked(xs, columns, range, 1, times, 0.5)", **values)


def test_a_merged_part_takes_the_place_of_others(js: Script) -> None:
    found = stack(js, [[5, 5, None, None], [None, None, 2, 2], [None, None, 3, 3]])
    assert found == {"x": [0, 1, 2, 3], "ys": [[5, 5, 0, 0], [0, 0, 2, 2], [0, 0, 3, 3]]}


def test_missing_moments_break_the_stack_only_where_they_last(js: Script) -> None:
    assert stack(js, [[1, None, 1, 1]])["x"] == [0, 2, 3]
    long = stack(js, [[1, 1, None, 1, 1]], xs=[0, 1, 2, 20, 21])
    assert long == {"x": [0, 1, 1, 20, 20, 21], "ys": [[1, 1, 0, 0, 1, 1]]}


def test_a_single_moment_is_seen_and_the_range_is_kept(js: Script) -> None:
    assert stack(js, [[3]], xs=[7]) == {"x": [7, 7.5], "ys": [[3, 3]]}
    assert stack(js, [[1] * 100], range=[40, 50])["x"] == list(range(39, 52))
    columns = [[1, 9, 1, 1], [None, 2, 3, None]]
    assert js("stackTop([0, 1, 2, 3], columns, [2, 3])", columns=columns) == 11
    assert js("stackTop([0, 1, 2, 3], columns, [3, 3])", columns=columns) == 4


TRACES = [
    {"style": "part", "metric": f"ledger/{key}", "label": key, "color": key}
    for key in ("free", "others", "cached", "activations", "parameters", "allocated")
] + [{"style": "context", "metric": "ledger/total", "label": "total", "color": "gray"}]
LEDGER_SUMS = [
    {
        "label": "reserved",
        "color": "orange",
        "of": [f"ledger/{key}" for key in ("cached", "activations", "parameters", "allocated")],
    },
    {"label": "sum", "color": "blue", "of": ["ledger/activations", "ledger/parameters"]},
]


def moment(**sizes: int) -> dict[str, Any]:
    return {"t": 1, "s": 1, "v": {f"ledger/{key}": size for key, size in sizes.items()}}


def test_the_table_has_the_order_of_the_stack_and_sums_above_their_parts(js: Script) -> None:
    now = moment(free=50, cached=10, activations=30, parameters=10, total=100)
    lines = js("linesOf(traces, sums, now)", traces=TRACES, sums=LEDGER_SUMS, now=now)
    assert [(line["label"], line["depth"]) for line in lines] == [
        ("free", 0),
        ("reserved", 0),
        ("cached", 1),
        ("sum", 1),
        ("activations", 2),
        ("parameters", 2),
    ]
    sizes = [js("bytesAt(moment, keys)", moment=now, keys=line["keys"]) for line in lines]
    assert sizes == [50, 50, 10, 40, 30, 10]
    assert js("bytesAt(null, ['ledger/free'])") is None
    assert js("[shareOf(0, 9), shareOf(1, 1e6), shareOf(2, 9)]") == ["0%", "<0.01%", "22%"]


def test_a_sum_of_one_part_is_not_said_twice(js: Script) -> None:
    now = moment(free=50, others=60, allocated=50)
    lines = js("linesOf(traces, sums, now)", traces=TRACES, sums=LEDGER_SUMS, now=now)
    assert [line["label"] for line in lines] == ["free", "others", "allocated"]


def test_the_moment_at_the_crosshair_is_the_one_before_a_gap(js: Script) -> None:
    series = {"t": [0, 1, 2], "s": [0, 5, 9], "v": {"ledger/free": {"mean": [7, None, 9]}}}
    found = [js("momentAt(series, 'time', x)", series=series, x=x) for x in (0.9, 1.0, 5)]
    assert [(at["t"], at["v"]["ledger/free"]) for at in found] == [(0, 7), (0, 7), (2, 9)]
    assert js("momentAt(null, 'time', 1)") is None


def alert(number: int, rule: str, state: str = "raised", **data: str) -> dict[str, Any]:
    told = {"rule": rule, "state": state, "level": "warning"} | data
    return {"id": number, "step": number, "kind": "alert", "text": rule, "data": told}


def test_alerts_that_were_raised_and_not_cleared_are_active(js: Script) -> None:
    events = [
        alert(1, "hot", uuid="GPU-a"),
        alert(2, "hot", uuid="GPU-b"),
        alert(3, "no_step"),
        alert(4, "hot", "cleared", uuid="GPU-a"),
        alert(5, "no_step", "cleared"),
        alert(6, "no_step"),
        {"id": 7, "kind": "alert", "text": "of another program"},
        {"id": 8, "kind": "nan", "data": {"rule": "x"}},
    ]
    active = js("activeAlerts(events).map(({id}) => id)", events=events)
    assert active == [2, 6, 7]


def test_each_rank_has_alarms_of_its_own(js: Script) -> None:
    zero, one = alert(1, "loss"), alert(2, "loss") | {"id": "rank1-1"}
    one["data"] |= {"rank": 1}
    over = alert(3, "loss", "cleared")
    assert js("activeAlerts(events).map(({id}) => id)", events=[zero, one, over]) == ["rank1-1"]


def test_alerts_of_other_ranks_are_new_once_and_do_not_move_the_place_in_the_events(
    js: Script,
) -> None:
    other = alert(1, "loss") | {"id": "rank1-1"}
    answers = [
        {"series": {}, "events": [alert(1, "a"), alert(2, "b")], "rank_events": [other]},
        {"series": {}, "events": [alert(2, "b"), alert(3, "c")], "rank_events": [other]},
        {"series": {}, "events": []},
    ]
    taken = js(
        "(() => { const store = new Store(() => {}); store.open('x'); const found = answers.map("
        "(answer) => store.take(answer).map(({id}) => id));"
        "return [found, store.question().events, store.events.length]; })()",
        answers=answers,
    )
    assert taken == [[[1, 2, "rank1-1"], [3], []], 3, 4]


def test_the_place_among_the_events_of_other_ranks_is_sent_with_the_next_question(
    js: Script,
) -> None:
    answer = {"series": {}, "events": [], "rank_events": [], "rank_events_seen": "ab~3"}
    asked = js(
        "(() => { const store = new Store(() => {}); store.open('x'); store.take(answer);"
        "const before = store.question().rank_events; store.open('y');"
        "return [before, store.question().rank_events ?? null]; })()",
        answer=answer,
    )
    assert asked == ["ab~3", None]


def test_what_ranks_answered_alike_to_a_command_is_one_row(js: Script) -> None:
    def freed(rank: int | None, text: str, command: int = 5) -> dict[str, Any]:
        data = {"command_id": command, "ok": True} | ({} if rank is None else {"rank": rank})
        said = text if rank is None else f"Rank {rank}: {text}"
        return {"id": f"{rank}-{command}", "kind": "empty_cache", "text": said, "data": data}

    events = [
        freed(None, "freed"),
        *(freed(rank, "freed") for rank in (1, 2, 4)),
        freed(3, "nothing to free"),
        freed(1, "freed", 6),
        {"id": "rank1-9", "kind": "alert", "text": "Rank 1: hot", "data": {"rank": 1}},
    ]
    texts = js("mergeRanks(events).map(({text}) => text)", events=events)
    assert texts == [
        "freed",
        "Ranks 1, 2 and 4: freed",
        "Rank 3: nothing to free",
        "Rank 1: freed",
        "Rank 1: hot",
    ]


def test_at_most_three_toasts_are_shown_and_one_that_is_over_goes(js: Script) -> None:
    shown = "shownAfter(shown, fresh).map(({id}) => id)"
    four = [alert(n, f"rule{n}") for n in range(4)]
    assert js(shown, shown=[], fresh=four) == [1, 2, 3]
    over = [alert(9, "rule2", "cleared"), {"id": 10, "kind": "epoch"}]
    assert js(shown, shown=four[1:], fresh=over) == [1, 3]
    assert js(shown, shown=four[1:], fresh=[alert(11, "rule1")]) == [2, 3, 11]


@pytest.mark.parametrize(
    ("event", "word", "tone", "label"),
    [
        (alert(1, "x", level="critical"), "Alert: Critical", "bad", "alert"),
        (alert(1, "x", level="<b>"), "Alert: Warning", "bad", "alert"),
        (alert(1, "x", level="info"), "Alert: Info", "routine", "alert"),
        (alert(1, "x", "cleared"), "Alert cleared", "routine", ""),
        ({"id": 1, "step": 1, "kind": "alerts_problem"}, "Alerts file", "routine", ""),
    ],
)
def test_an_alert_is_in_the_events_with_its_level(
    js: Script, event: dict[str, Any], word: str, tone: str, label: str
) -> None:
    assert js("rowsOf([event], 'failures')[0].word", event=event) == word
    assert js("toneOf(event)", event=event) == tone
    assert js("marksIn([event], 'step', [0, 9])[0].label", event=event) == label


def test_a_line_of_the_devices_page_breaks_where_nothing_was_read(js: Script) -> None:
    history = {"t": [0, 1, 2, 10, 11], "v": {"a": [0, 50, None, 100, 90]}}
    line = {"key": "a", "label": "used", "color": "blue"}
    chart = {"unit": "%", "top": 100, "lines": [line], "mark": {"label": "limit", "value": 95}}
    theme = {"palette": {"blue": "#00f", "gray": "#888"}}
    figure = "chartFigure(chart, history, 20, theme)"
    drawn = js(figure, chart=chart, history=history, theme=theme)
    line, limit = drawn["data"]
    assert (line["name"], line["y"]) == ("used 90%", [0, 50, None, 100, 90, None])
    assert (limit["name"], limit["y"]) == ("limit 95%", [95, 95])
    assert drawn["layout"]["yaxis"]["range"] == [0, 100]
    empty = js(figure, chart=chart, history={"t": [], "v": {}}, theme=theme)
    assert (empty["data"][0]["name"], empty["data"][0]["y"]) == ("used n/a", [])


def test_the_edge_of_a_chart_of_the_devices_page(js: Script) -> None:
    assert js("topOf({ top: 80 }, [[1, 2]])") == 80
    assert js("topOf({ top: null, mark: { value: 700 } }, [[1, 2]])") == pytest.approx(756)
    assert js("topOf({ top: null, mark: null }, [[1, null, 200], []])") == pytest.approx(216)
    assert js("topOf({ top: null, mark: null }, [[0]])") == 1
    assert js("topOf({ unit: 'B/s' }, [[3, 0]])") == pytest.approx(1.08 * 2**20)


def test_the_history_of_a_gpu_grows_once_a_reading_and_forgets(js: Script) -> None:
    grown = """(() => {
      const held = { t: [], v: {} };
      extend(held, { t: [1, 2], v: { a: [10, 20] } }, 2);
      extend(held, { t: [2, 3], v: { a: [20, 30], b: [7, 8] } }, 3);
      extend(held, { t: [3], v: { a: [30], b: [8] } }, 3);
      return held;
    })()"""
    assert js(grown) == {"t": [1, 2, 3], "v": {"a": [10, 20, 30], "b": [None, None, 8]}}
    old = "(() => { const held = { t: [1, 500, 700], v: { a: [1, 2, 3] } };"
    old += " extend(held, { t: [], v: {} }, 1000); return held; })()"
    assert js(old) == {"t": [500, 700], "v": {"a": [2, 3]}}


def test_bytes_a_second_have_binary_units(js: Script) -> None:
    assert js("withUnit(1610612736, 'B/s')") == "1.50 GiB/s"
    assert js("withUnit(0, 'B/s')") == "0 B/s"


def test_a_stack_keeps_its_sum_where_a_part_takes_the_place_of_others(js: Script) -> None:
    parts = {"ledger/used": [6, 6, None, None], "ledger/free": [4, 4, 4, 4]}
    parts |= {"ledger/elsewhere": [None, None, 5, 5], "ledger/allocated": [None, None, 1, 3]}
    given = {
        **{"end": 4, "bucket": 1, "first": 0, "reset": True, "stack": True},
        **{"t": [0, 1, 2, 3], "s": [0, 0, 0, 0]},
        "v": {key: {"mean": means} for key, means in parts.items()},
    }
    whole = js("coarsen(mergeSeries(null, part), 4).v", part=given)
    means = {key: column["mean"] for key, column in whole.items()}
    assert means["ledger/free"] == [4]
    assert sum(column[0] for column in means.values()) == pytest.approx((10 + 10 + 10 + 12) / 4)
    gap = given | {"v": {"ledger/free": {"mean": [4, None, None, 8]}}}
    assert js("coarsen(mergeSeries(null, part), 4).v['ledger/free'].mean", part=gap) == [6]


def test_a_poll_that_was_planned_is_not_sent_once_it_is_idle(js: Script) -> None:
    """A press on another tab sent `/api/ranks?run=null`, which the server answered with 404."""
    polled = """(() => {
      globalThis.document = { addEventListener() {}, hidden: false };
      const asked = [];
      const poller = new Poller({ url: () => asked.push("url"), idle: () => idle });
      poller.trouble = poller.refused = poller.take = () => {};
      poller.poll().catch(() => {});
      poller.closed = true;
      clearTimeout(poller.timer);
      delete globalThis.document;
      return asked;
    })()"""
    assert js(polled, idle=True) == []
    assert js(polled, idle=False) == ["url"]
