"""What a sweep found as a Plotly figure: effects as points with intervals around a zero line; pure.

The figure is a plain dict. It depends on nothing that moves while no new result is there, so that
Streamlit keeps the drawn chart: an element is drawn anew when its figure differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
# After Okabe and Ito, told apart with any color vision; each has a contrast of at least 3:1 on the
# light and on the dark background. page.css gives the table's marks the same colors and shapes.
COLORS: dict[Verdict, str] = {
    Verdict.FASTER: "#1a80c4",
    Verdict.SLOWER: "#d55e00",
    Verdict.NO_DIFFERENCE: "#7a8490",
    Verdict.UNDECIDED: "#b07d00",
    Verdict.MEASURING: "#b07d00",
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
LABEL_LENGTH = 34
"""Characters of a label beside the chart; the table has the whole one."""


def by_effect(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms with an effect, the fastest first, then those without one, as they were."""
    return sorted(arms, key=lambda arm: (arm.effect is None, -(arm.effect or 0.0)))


def drawn(sweep: SweepContent) -> list[Arm]:
    """Return what has an effect to draw, the best combination first."""
    found = [arm for arm in by_effect(sweep.arms) if arm.effect is not None]
    best = sweep.best.arm if sweep.best is not None else None
    return [best, *found] if best is not None and best.effect is not None else found


def effects_figure(sweep: SweepContent) -> dict[str, Any] | None:
    """Return the chart of effects in percent; None while no setting has one."""
    arms = drawn(sweep)
    if not arms:
        return None
    rows = {arm.name: row for row, arm in enumerate(arms)}
    verdicts = [verdict for verdict in COLORS if any(arm.verdict is verdict for arm in arms)]
    traces = [
        _trace(verdict, [arm for arm in arms if arm.verdict is verdict], rows)
        for verdict in verdicts
    ]
    return {"data": traces, "layout": _layout(arms, sweep.margin)}


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


def _trace(verdict: Verdict, arms: list[Arm], rows: dict[str, int]) -> dict[str, Any]:
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


def _layout(arms: list[Arm], margin: float | None) -> dict[str, Any]:
    shapes = []
    if margin:
        # Within it a difference counts as none.
        shapes.append(_band(-100 * margin, 100 * margin))
    return {
        "height": 92 + ROW_PX * len(arms),
        "margin": {"l": 8, "r": 16, "t": 36, "b": 44},
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "font": {"size": 13},
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "hovermode": "closest",
        "dragmode": False,
        "shapes": shapes,
        "xaxis": {
            "title": {"text": "Throughput against the baseline", "font": {"size": 13}},
            "zeroline": True,
            "zerolinewidth": 2,
            "zerolinecolor": "#7a8490",
            "ticksuffix": " %",
            "tickfont": {"size": 13},
            "range": _range(arms, margin or 0.0),
            "fixedrange": True,
        },
        "yaxis": {
            "tickvals": list(range(len(arms))),
            "ticktext": [_label(arm) for arm in arms],
            "range": [len(arms) - 0.5, -0.5],
            "automargin": True,
            "tickfont": {"size": 13},
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
    }


def _range(arms: list[Arm], margin: float) -> list[float]:
    """Return what of the axis is shown, in percent: an interval far wider than the effects, as two
    rounds give it, runs out of the chart instead of hiding them."""
    most = 3 * max(0.02, margin, *(abs(arm.effect or 0.0) for arm in arms))
    ends = [end for arm in arms for end in (arm.low, arm.high, arm.effect) if end is not None]
    low, high = min(-2 * margin, *ends), max(2 * margin, *ends)
    low, high = max(low, -most), min(high, most)
    room = 0.04 * (high - low)
    return [round(100 * (low - room), 3), round(100 * (high + room), 3)]


def _band(low: float, high: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": low,
        "x1": high,
        "y0": 0,
        "y1": 1,
        "fillcolor": "#7a8490",
        "opacity": 0.16,
        "line": {"width": 0},
        "layer": "below",
    }


def _label(arm: Arm) -> str:
    short = arm.label if len(arm.label) <= LABEL_LENGTH else f"{arm.label[: LABEL_LENGTH - 1]}…"
    return plain(short)


def _hover(arm: Arm) -> str:
    word = WORDS[arm.verdict] if arm.verdict is not None else ""
    figures = f"{percent(arm.effect)} {interval(arm.low, arm.high)}".strip()
    return f"<b>{plain(arm.label)}</b><br>{word}: {figures}<br>{arm.rounds} rounds"


def plain(text: str) -> str:
    """Return a text that Plotly shows as it is: it reads some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _shown(effect: float | None) -> float | None:
    return None if effect is None else round(100 * effect, 3)


def _length(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else round(max(0.0, 100 * (high - low)), 3)
