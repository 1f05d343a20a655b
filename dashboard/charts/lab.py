"""What a sweep found as a Plotly figure: effects as points with intervals around a zero line; pure.

The figure is a plain dict. It depends on nothing that moves while no new result is there, so that
Streamlit keeps the drawn chart: an element is drawn anew when its figure differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dashboard.charts.figures import (
    AMBER,
    BLUE,
    FIXED,
    GRAY,
    ORANGE,
    Json,
    band,
    layout,
    plain,
    rows_axis,
    shortened,
    title,
)
from dashboard.sweep_content import Arm, SweepContent, Verdict

WORDS: dict[Verdict, str] = {
    Verdict.FASTER: "faster",
    Verdict.SLOWER: "slower",
    Verdict.NO_DIFFERENCE: "no difference",
    Verdict.UNDECIDED: "undecided",
    Verdict.MEASURING: "measuring",
    Verdict.FAILED: "failed",
    Verdict.IMPOSSIBLE: "impossible",
}
COLORS: dict[Verdict, str] = {
    Verdict.FASTER: BLUE,
    Verdict.SLOWER: ORANGE,
    Verdict.NO_DIFFERENCE: GRAY,
    Verdict.UNDECIDED: AMBER,
    Verdict.MEASURING: AMBER,
}
SYMBOLS: dict[Verdict, str] = {
    Verdict.FASTER: "triangle-right",
    Verdict.SLOWER: "triangle-left",
    Verdict.NO_DIFFERENCE: "circle",
    Verdict.UNDECIDED: "diamond-open",
    Verdict.MEASURING: "circle-open",
}
ROW_PX = 34
LARGEST = 10.0
"""Effect from which on a figure says only "above": two rounds can give an interval of millions."""
LABEL_LENGTH = 34  # Characters of a label beside the chart; the table has the whole one.


def by_effect(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms with an effect, the fastest first, then those without one, as they were."""
    return sorted(arms, key=lambda arm: (arm.effect is None, -(arm.effect or 0.0)))


def drawn(sweep: SweepContent) -> list[Arm]:
    """Return what has an effect to draw, the best combination first."""
    found = [arm for arm in by_effect(sweep.arms) if arm.effect is not None]
    best = sweep.best
    return [best, *found] if best is not None and best.effect is not None else found


def effects_figure(sweep: SweepContent) -> Json | None:
    """Return the chart of effects in percent; None while no setting has one."""
    arms = drawn(sweep)
    if not arms:
        return None
    rows: dict[str, int] = {arm.name: row for row, arm in enumerate(arms)}
    verdicts = [verdict for verdict in COLORS if any(arm.verdict is verdict for arm in arms)]
    traces = [
        _trace(verdict, [arm for arm in arms if arm.verdict is verdict], rows)
        for verdict in verdicts
    ]
    return {"data": traces, "layout": _layout(arms, sweep.plan.margin)}


def percent(value: float | None, *, signed: bool = True) -> str:
    """Return a share as percent with a true minus sign, "–" where there is none.

    >>> percent(0.1204), percent(-0.005), percent(0.02, signed=False), percent(None)
    ('+12.0 %', '−0.5 %', '2.0 %', '–')
    >>> percent(12_345.0)
    'above +1000 %'
    """
    return "–" if value is None else f"{_figure(value, '+' if signed else '')} %"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval in percent, "" where there is none.

    >>> interval(-0.01, 0.031)
    '[−1.0, +3.1]'
    """
    if low is None or high is None:
        return ""
    return f"[{_figure(low, '+')}, {_figure(high, '+')}]"


def _figure(value: float, sign: str) -> str:
    if value > LARGEST:
        return f"above {sign}{100 * LARGEST:.0f}"
    return f"{100 * value:{sign}.1f}".replace("-", "\N{MINUS SIGN}")


def _trace(verdict: Verdict, arms: list[Arm], rows: dict[str, int]) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": WORDS[verdict],
        "x": [_shown(arm.effect) for arm in arms],
        "y": [rows[arm.name] for arm in arms],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_length(arm.high, arm.effect) for arm in arms],
            "arrayminus": [_length(arm.effect, arm.low) for arm in arms],
            "thickness": 2,
            "width": 5,
            "color": COLORS[verdict],
        },
        "marker": {"symbol": SYMBOLS[verdict], "size": 11, "color": COLORS[verdict]}
        | ({"line": {"width": 2}} if SYMBOLS[verdict].endswith("open") else {}),
        "text": [_hover(arm) for arm in arms],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _layout(arms: list[Arm], margin: float | None) -> Json:
    # Within the margin a difference counts as none.
    same: Json = {"fillcolor": GRAY, "opacity": 0.16, "layer": "below"}
    x_axis = {
        "title": title("Throughput against the baseline"),
        "zerolinewidth": 2,
        "zerolinecolor": GRAY,
        "ticksuffix": " %",
        "tickfont": {"size": 13},
        "range": _range(arms, margin or 0.0),
    }
    return layout(
        92 + ROW_PX * len(arms),
        showlegend=True,
        shapes=[band("x", -100 * margin, 100 * margin, **same)] if margin else [],
        xaxis=FIXED | x_axis | {"zeroline": True},
        yaxis=rows_axis([shortened(arm.label, LABEL_LENGTH) for arm in arms]),
    )


def _range(arms: list[Arm], margin: float) -> list[float]:
    """Return what of the axis is shown, in percent: an interval far wider than the effects, as two
    rounds give it, runs out of the chart instead of hiding them."""
    most = 3 * max(0.02, margin, *(abs(arm.effect or 0.0) for arm in arms))
    ends = [end for arm in arms for end in (arm.low, arm.high, arm.effect) if end is not None]
    low, high = min(-2 * margin, *ends), max(2 * margin, *ends)
    low, high = max(low, -most), min(high, most)
    room = 0.04 * (high - low)
    return [round(100 * (low - room), 3), round(100 * (high + room), 3)]


def _hover(arm: Arm) -> str:
    word = WORDS[arm.verdict] if arm.verdict is not None else ""
    figures = f"{percent(arm.effect)} {interval(arm.low, arm.high)}".strip()
    return f"<b>{plain(arm.label)}</b><br>{word}: {figures}<br>{arm.rounds} rounds"


def _shown(effect: float | None) -> float | None:
    return None if effect is None else round(100 * effect, 3)


def _length(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else round(max(0.0, 100 * (high - low)), 3)


MIB = 2.0**20
MARKS = {
    Verdict.FASTER: "▶",
    Verdict.SLOWER: "◀",
    Verdict.NO_DIFFERENCE: "●",
    Verdict.UNDECIDED: "◇",
    Verdict.MEASURING: "○",
    Verdict.FAILED: "✕",
    Verdict.IMPOSSIBLE: "–",
}
METRICS = {
    "Samples/s": ("samples_per_sec", 1.0),
    "Step time": ("step_time", 1e3),
    "Data wait": ("data_wait", 1e3),
    "H2D copy": ("h2d", 1e3),
    "GPU time": ("gpu_time", 1e3),
    "Peak allocated": ("peak_allocated", 1 / MIB),
    "Peak reserved": ("peak_reserved", 1 / MIB),
    "Peak process": ("peak_process", 1 / MIB),
    "Energy": ("energy_per_sample", 1e3),
    "MFU": ("mfu", 100.0),
    "Loss": ("loss", 1.0),
}
"""Metric and factor of each column of measured values."""


def listed(sweep: SweepContent) -> list[Arm]:
    """Return what the table lists: the best combination, the baseline, then arms by effect."""
    best = [sweep.best] if sweep.best is not None else []
    return [*best, sweep.baseline, *by_effect(sweep.arms)]


def rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return a row an arm; None where it has no value, no column where none has one."""
    made = [_row(arm) for arm in arms]
    used = {name for row in made for name, value in row.items() if value is not None}
    return [{name: value for name, value in row.items() if name in used} for row in made]


def _row(arm: Arm) -> dict[str, Any]:
    verdict = arm.verdict
    return {
        "Setting": arm.label if verdict is not None else f"Baseline: {arm.label}",
        "Verdict": None if verdict is None else f"{MARKS[verdict]} {WORDS[verdict]}",
        "Reason": arm.reason,
        "Effect": None if verdict is None or arm.effect is None else 100 * arm.effect,
        "Interval": interval(arm.low, arm.high) or None,
        "Margin of error": None if arm.resolution is None else 100 * arm.resolution,
        "Rounds": arm.rounds or None,
        **{
            title: None if key not in arm.metrics else factor * arm.metrics[key]
            for title, (key, factor) in METRICS.items()
        },
        "Loss verdict": arm.loss.verdict and arm.loss.verdict.replace("_", " "),
    }


def absent_sentence(sweep: SweepContent) -> str | None:
    """Return which measurements this machine does not give; None where all are there."""
    measured = [arm.metrics for arm in listed(sweep) if arm.metrics]
    missing = [
        words
        for words, metric in (
            ("allocated and reserved memory", "peak_allocated"),
            ("energy", "energy_per_sample"),
        )
        if not any(metric in metrics for metrics in measured)
    ]
    if not measured or not missing:
        return None
    names = " and no ".join(missing)
    if sweep.config.get("device") == "cpu":
        return f"Not available on CPU: {names}."
    return f"This GPU or its driver gives no {names}."
