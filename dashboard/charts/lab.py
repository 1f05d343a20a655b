"""The results of a sweep as a Plotly figure of effects, and as table rows. No I/O.

The figure changes only with a new result: Streamlit redraws an element whose figure differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.charts import figures
from dashboard.charts.figures import Json
from dashboard.sweep_content import SweepContent, VariantResult
from stepscope.lab.statistics import MARGIN
from stepscope.lab.verdict_text import VariantVerdict, signed


@dataclass(frozen=True, slots=True)
class VerdictStyle:
    """Text and mark of a verdict in the table; color and symbol of its points in the chart."""

    text: str
    mark: str
    color: str = figures.GRAY
    symbol: str | None = None


STYLES = {
    VariantVerdict.FASTER: VerdictStyle("faster", "▶", figures.BLUE, "triangle-right"),
    VariantVerdict.SLOWER: VerdictStyle("slower", "◀", figures.ORANGE, "triangle-left"),
    VariantVerdict.NO_DIFFERENCE: VerdictStyle("no difference", "●", figures.GRAY, "circle"),
    VariantVerdict.UNDECIDED: VerdictStyle("inconclusive", "◇", figures.AMBER, "diamond-open"),
    VariantVerdict.MEASURING: VerdictStyle("measuring", "○", figures.AMBER, "circle-open"),
    VariantVerdict.FAILED: VerdictStyle("failed", "✕"),
    VariantVerdict.IMPOSSIBLE: VerdictStyle("impossible", "–"),
}
ROW_PX = 34
MAX_LABEL_CHARS = 34  # in the chart; the table has the whole label


def by_effect(variants: Iterable[VariantResult]) -> list[VariantResult]:
    """Return the variants by descending effect, those without an effect last."""
    return sorted(variants, key=lambda variant: (variant.effect is None, -(variant.effect or 0.0)))


def effects_figure(sweep: SweepContent) -> Json | None:
    """Return the chart of effects in percent, the best combination first; None without effects."""
    variants = [variant for variant in listed(sweep) if variant.effect is not None]
    if not variants:
        return None
    rows: dict[str, int] = {variant.name: row for row, variant in enumerate(variants)}
    traces = [
        _trace(verdict, shown, rows)
        for verdict in STYLES
        if (shown := [variant for variant in variants if variant.verdict is verdict])
    ]
    return {"data": traces, "layout": _layout(variants)}


def interval(low: float | None, high: float | None) -> str:
    """Return an interval in percent; "" if a bound is missing.

    >>> interval(-0.01, 0.031)
    '[−1.0%, +3.1%]'
    """
    return "" if low is None or high is None else f"[{signed(low)}, {signed(high)}]"


def _trace(verdict: VariantVerdict, variants: list[VariantResult], rows: dict[str, int]) -> Json:
    style = STYLES[verdict]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": style.text,
        "x": [round(100 * (variant.effect or 0.0), 3) for variant in variants],
        "y": [rows[variant.name] for variant in variants],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_length(variant.high, variant.effect) for variant in variants],
            "arrayminus": [_length(variant.effect, variant.low) for variant in variants],
            "thickness": 2,
            "width": 5,
            "color": style.color,
        },
        "marker": {
            "symbol": style.symbol,
            "size": 11,
            "color": style.color,
            "line": {"width": 2 if str(style.symbol).endswith("open") else 0},
        },
        "text": [_hover(variant) for variant in variants],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _layout(variants: list[VariantResult]) -> Json:
    # Intervals far wider than the effects are cut off.
    limit = 300 * max(0.02, *(abs(variant.effect or 0.0) for variant in variants))
    # Effects within the margin count as no difference.
    same: Json = {
        "type": "rect",
        "x0": -100 * MARGIN,
        "x1": 100 * MARGIN,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"width": 0},
        "fillcolor": figures.GRAY,
        "opacity": 0.16,
        "layer": "below",
    }
    x_axis = {
        "title": figures.title("Throughput vs. baseline"),
        "zerolinewidth": 2,
        "zerolinecolor": figures.GRAY,
        "ticksuffix": "%",
        "tickfont": {"size": 13},
        "range": [-limit, limit],
    }
    return figures.layout(
        92 + ROW_PX * len(variants),
        showlegend=True,
        shapes=[same],
        xaxis=figures.FIXED | x_axis | {"zeroline": True},
        yaxis=figures.rows_axis(
            [figures.shortened(variant.label, MAX_LABEL_CHARS) for variant in variants]
        ),
    )


def _hover(variant: VariantResult) -> str:
    text = STYLES[variant.verdict].text if variant.verdict is not None else ""
    effect = f"{signed(variant.effect or 0.0)} {interval(variant.low, variant.high)}".strip()
    return f"<b>{figures.plain(variant.label)}</b><br>{text}: {effect}<br>{variant.rounds} rounds"


def _length(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else round(max(0.0, 100 * (high - low)), 3)


MIB = 2.0**20
METRICS = {  # Metric and unit factor of each column of measured values.
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


def listed(sweep: SweepContent) -> list[VariantResult]:
    """Return the rows' order: the best combination, the baseline, then variants by effect."""
    best = [sweep.best] if sweep.best is not None else []
    return [*best, sweep.baseline, *by_effect(sweep.variants)]


def rows(variants: Sequence[VariantResult]) -> list[dict[str, Any]]:
    """Return one row per variant, with the columns that have a value in any row."""
    made = [_row(variant) for variant in variants]
    used = {name for row in made for name, value in row.items() if value is not None}
    return [{name: value for name, value in row.items() if name in used} for row in made]


def reasons(variants: Sequence[VariantResult]) -> dict[str, list[str]]:
    """Return why variants failed or have no verdict, each with the variants that it is about."""
    found: dict[str, list[str]] = {}
    for variant in variants:
        if variant.reason is not None:
            label = _label(variant)
            setting, _, text = variant.reason.partition(": ")
            found.setdefault(text if setting in label.split() else variant.reason, []).append(label)
    return found


def _label(variant: VariantResult) -> str:
    return variant.label if variant.verdict is not None else f"Baseline: {variant.label}"


def _row(variant: VariantResult) -> dict[str, Any]:
    style = None if variant.verdict is None else STYLES[variant.verdict]
    margin = variant.resolution
    if margin is not None and margin > max(1.0, abs(variant.effect or 0.0)):
        margin = None  # after two or three rounds an interval of any size
    bounds = "" if margin is None else interval(variant.low, variant.high)
    return {
        "Setting": _label(variant),
        "Verdict": None if style is None else f"{style.mark} {style.text}",
        "Loss verdict": _loss(variant),  # not last, where the page's edge would cut it
        "Effect": None if style is None or variant.effect is None else 100 * variant.effect,
        "Interval": bounds or None,
        "Margin of error": None if margin is None else 100 * margin,
        "Rounds": variant.rounds or None,
        **{
            title: None if key not in variant.metrics else factor * variant.metrics[key]
            for title, (key, factor) in METRICS.items()
        },
    }


def _loss(variant: VariantResult) -> str | None:
    if variant.loss.verdict == "undecided":
        expected = variant.verdict is VariantVerdict.MEASURING or "loss" in variant.metrics
        return None if expected else "no loss"
    return variant.loss.verdict and variant.loss.verdict.replace("_", " ")
