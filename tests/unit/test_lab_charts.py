"""A sweep as a chart and a table: sorted, with words beside colors, safe against foreign files."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import pytest

from dashboard.charts.lab import STYLES, effects_figure, listed, rows
from dashboard.sweep_content import to_content
from tests.support.fake_sweep import VARIANTS, metrics, sweep, variant


def figure(**others: Any) -> dict[str, Any]:
    made = effects_figure(to_content(sweep(**others)))
    assert made is not None
    return made


def table(**others: Any) -> list[dict[str, Any]]:
    return rows(listed(to_content(sweep(**others))))


def test_the_chart_has_the_effects_sorted_with_their_intervals() -> None:
    made = figure()
    go.Figure(made)  # Plotly knows every entry
    assert made["layout"]["yaxis"]["ticktext"] == [
        "compile on",
        "num_workers on",
        "channels_last on",
        "deterministic on",
    ]
    points = {trace["name"]: trace for trace in made["data"]}
    assert set(points) == {"faster", "inconclusive", "no difference", "slower"}
    slower = points["slower"]
    assert (slower["x"], slower["y"]) == ([-20.0], [3])
    assert slower["error_x"]["array"] == slower["error_x"]["arrayminus"] == [2.0]


def test_no_verdict_is_told_by_color_alone() -> None:
    assert len({style.mark for style in STYLES.values()}) == len(STYLES)
    symbols = [style.symbol for style in STYLES.values() if style.symbol]
    assert len(set(symbols)) == len(symbols)


def test_a_row_has_the_word_and_its_figures() -> None:
    made = table(variants=[VARIANTS[2]])[1]
    assert made["Verdict"] == "▶ faster"
    assert made["Interval"] == "[+29.0%, +33.0%]"
    figures = {"Effect": 31, "Margin of error": 2, "Samples/s": 13_100, "Peak process": 512}
    assert {name: made[name] for name in figures} == pytest.approx(figures)
    assert made["Data wait"] == 1.0


def test_a_margin_beyond_the_effect_itself_is_not_shown() -> None:
    early = variant("compile", "measuring", 0.31, resolution=1.9e9)
    made = table(variants=[early])[1]
    assert not {"Margin of error", "Interval"} & made.keys()
    assert made["Effect"] == pytest.approx(31)


def test_a_loss_that_no_trial_has_is_no_loss() -> None:
    loss = {"verdict": "undecided", "text": "no loss"}
    variants = [
        variant("compile", "failed", loss=loss),
        variant("tf32", "measuring", loss=loss),
        variant("bf16", "undecided", 0.1, loss=loss),  # has a loss, not yet a verdict
        VARIANTS[0],
    ]
    shown = [row["Loss verdict"] for row in rows(to_content(sweep(variants=variants)).variants)]
    assert shown == ["no loss", None, None, "same"]


def test_progress_within_a_time_budget_is_a_fraction_of_the_time() -> None:
    plan = sweep()["plan"]
    progress = {"done": 3, "total": 240, "seconds_left": 45.0}
    content = to_content(sweep("running", plan=plan | {"minutes": 3}, progress=progress))
    assert content.share == pytest.approx(0.75)
    without_budget = to_content(sweep("running", plan=plan, progress=progress))
    assert without_budget.share == pytest.approx(3 / 240)


def test_columns_without_a_value_are_left_out() -> None:
    assert not {"Energy", "MFU"} & table()[0].keys()
    measured = metrics(1.0, peak_allocated=2.0**30, peak_reserved=2.0**31, energy_per_sample=0.012)
    gpu = sweep(variants=[variant("compile", "faster", 0.1, metrics=measured)])
    made = rows(to_content(gpu).variants)[0]
    assert [made[name] for name in ("Peak allocated", "Peak reserved", "Energy")] == [
        1024,
        2048,
        12,
    ]


@pytest.mark.parametrize(
    "broken",
    [
        {"variants": None, "plan": None, "best": None, "progress": None, "baseline": None},
        {"variants": [variant("x", "undecided", float("nan"))]},
        {"variants": [{"name": "<b>", "verdict": "faster", "effect": 1e300, "low": float("-inf")}]},
    ],
)
def test_a_file_of_another_version_is_drawn(broken: dict[str, Any]) -> None:
    content = to_content(sweep(**broken))
    rows(listed(content))
    figure = effects_figure(content)
    if figure is not None:
        go.Figure(figure)


@pytest.mark.parametrize(
    "broken",
    [
        {"baseline": 3},
        {"variants": [None]},
        {"updated": "never"},
        {"left_out": {"a": 3}},
        {"workload": None},
    ],
)
def test_a_file_in_another_form_is_refused(broken: dict[str, Any]) -> None:
    content = {name: value for name, value in sweep(**broken).items() if value is not None}
    with pytest.raises(ValueError, match=r"sweep\.json: must be that of a sweep"):
        to_content(content)
