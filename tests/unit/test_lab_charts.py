"""A sweep as a chart and a table: sorted, with words beside colors, safe against foreign files."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import pytest

from dashboard.charts.lab import STYLES, effects_figure, listed, reasons, rows
from dashboard.sweep_content import to_content
from tests.support.fake_sweep import BEST, VARIANTS, metrics, sweep, variant


def figure(**others: Any) -> dict[str, Any]:
    made = effects_figure(to_content(sweep(**others)))
    assert made is not None
    return made


def table(**others: Any) -> list[dict[str, Any]]:
    return rows(listed(to_content(sweep(**others))))


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2.2."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


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
    assert effects_figure(to_content(sweep(variants=[variant("compile", "measuring")]))) is None
    slower = points["slower"]
    assert (slower["x"], slower["y"]) == ([-20.0], [3])
    assert slower["error_x"]["array"] == slower["error_x"]["arrayminus"] == [2.0]


def test_the_best_combination_stands_first() -> None:
    made = figure(best=BEST)
    assert made["layout"]["yaxis"]["ticktext"][0] == "Best combination"
    labels = [row["Setting"] for row in table(best=BEST)]
    assert labels[:2] == ["Best combination", "Baseline: digits_mlp on CPU, fp32"]
    assert [label.removesuffix(" on") for label in labels[2:]] == [
        *("compile", "num_workers", "channels_last", "deterministic", "cuda_graphs", "precision")
    ]


def test_a_reason_does_not_repeat_its_setting() -> None:
    refused = {"verdict": "impossible", "reason": "pin_memory: pin_memory needs a GPU."}
    variants = [
        {"name": label, "label": label, **refused}
        for label in ("pin_memory", "num_workers=2 pin_memory", "other")
    ]
    found = reasons(to_content(sweep(variants=variants)).variants)
    assert found == {
        "pin_memory needs a GPU.": ["pin_memory", "num_workers=2 pin_memory"],
        refused["reason"]: ["other"],
    }


@pytest.mark.parametrize("background", ["#ffffff", "#12161c", "#f5f6f8", "#1a2029"])
def test_marks_are_seen_on_both_themes(background: str) -> None:
    assert min(contrast(color, background) for color in {s.color for s in STYLES.values()}) >= 3


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


def test_a_loss_that_is_not_shown_equal_is_marked() -> None:
    loss = {"verdict": "not_shown_equal", "text": "loss not shown equal: +0.5 % [-4.0, +5.0]"}
    marked = variant("compile", "faster", 0.31, loss=loss)
    content = to_content(sweep(variants=[marked, VARIANTS[0]]))
    assert [row["Loss verdict"] for row in rows(content.variants)] == ["not shown equal", "same"]


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
        {"progress": []},
        {"variants": [None]},
        {"variants": [{"name": 5}]},
        {"updated": "never"},
        {"created": 1e300},
        {"best": {"variants": 3}},
        {"left_out": {"a": 3}},
        {"rounds": [{"trials": []}]},
        {"status": None},
        {"workload": None},
    ],
)
def test_a_file_in_another_form_is_refused(broken: dict[str, Any]) -> None:
    content = {name: value for name, value in sweep(**broken).items() if value is not None}
    with pytest.raises(ValueError, match=r"sweep\.json: must be that of a sweep"):
        to_content(content)
