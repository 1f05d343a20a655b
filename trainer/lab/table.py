"""The rows of a sweep as texts, for the terminal and the report; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import format_bytes
from trainer.lab.verdict_text import VariantVerdict, percent

HEADINGS = (
    *("setting", "verdict", "resolution", "samples/s", "step", "data wait", "peak"),
    *("loss", "rounds"),
)
NUMBERS = frozenset(HEADINGS) - {"setting", "verdict", "loss"}
"""Columns whose cells end at the right."""

_LAST = (
    VariantVerdict.MEASURING,
    VariantVerdict.UNDECIDED,
    VariantVerdict.FAILED,
    VariantVerdict.IMPOSSIBLE,
)


def ordered(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the arms with the largest effect first; those without a verdict come after."""

    def place(arm: Mapping[str, Any]) -> tuple[int, float]:
        behind = _LAST.index(arm["verdict"]) + 1 if arm["verdict"] in _LAST else 0
        return behind, -(arm["effect"] or 0.0)

    return sorted(sweep["arms"], key=place)


def rows(sweep: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each arm, and those of the baseline before them."""
    baseline = sweep["baseline"]
    metrics = _metrics(baseline["metrics"])
    return [
        ("baseline", str(baseline["label"]), "", *metrics, "", str(baseline["rounds"])),
        *(
            (
                str(arm["name"]),
                str(arm["text"]),
                "" if arm["resolution"] is None else percent(float(arm["resolution"])),
                *_metrics(arm["metrics"]),
                str(arm["loss"]["text"]) if arm["effect"] is not None else "",
                str(arm["rounds"]),
            )
            for arm in ordered(sweep)
        ),
    ]


def _metrics(metrics: Mapping[str, Any]) -> tuple[str, str, str, str]:
    rate = metrics["samples_per_sec"]
    peak = metrics["peak_allocated"]
    return (
        "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        milliseconds(metrics["step_time"]),
        milliseconds(metrics["data_wait"]),
        "" if rate is None else format_bytes(metrics["peak_process"] if peak is None else peak),
    )


def milliseconds(seconds: float | None) -> str:
    """Return a time in ms with three digits, empty where it is missing."""
    if seconds is None:
        return ""
    value = 1000 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
