"""A sweep as a table in a terminal; texts of a foreign folder are escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import (
    format_bytes,
    format_duration,
    format_short_time,
    printable,
    three_digits,
)
from stepscope.lab.verdict_text import EFFECT, of_best, percent, summary

HEADINGS = (
    *("setting", "verdict", "resolution", "samples/s", "step", "data wait", "peak"),
    *("loss", "rounds"),
)
NUMBERS = frozenset(HEADINGS) - {"setting", "verdict", "loss"}
"""Right-aligned columns."""
RATE = "samples/s"
_LAST = ("measuring", "undecided", "failed", "impossible")


def ordered(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the variants, the largest effect first and those without a verdict last."""

    def place(variant: Mapping[str, Any]) -> tuple[int, float]:
        behind = _LAST.index(variant["verdict"]) + 1 if variant["verdict"] in _LAST else 0
        return behind, -(variant["effect"] or 0.0)

    return sorted(sweep["variants"], key=place)


def rows(sweep: Mapping[str, Any]) -> list[tuple[str, ...]]:
    baseline = sweep["baseline"]
    found: list[tuple[str, ...]] = [
        ("baseline", baseline["label"], "", *_metrics(baseline), "", str(baseline["rounds"]))
    ]
    for variant in ordered(sweep):
        resolution = variant["resolution"]
        found.append(
            (
                str(variant["name"]),
                str(variant["text"]),
                "" if resolution is None else percent(float(resolution)),
                *_metrics(variant),
                str(variant["loss"]["text"]) if variant["effect"] is not None else "",
                str(variant["rounds"]),
            )
        )
    return found


def _metrics(variant: Mapping[str, Any]) -> tuple[str, str, str, str]:
    metrics = variant["metrics"]
    rate, peak = metrics["samples_per_sec"], metrics["peak_allocated"]
    step, wait = (
        "" if metrics[name] is None else format_short_time(metrics[name])
        for name in ("step_time", "data_wait")
    )
    if rate is None:
        return "", step, wait, ""
    peak = metrics["peak_process"] if peak is None else peak
    return three_digits(rate), step, wait, format_bytes(peak)


def _unit(sweep: Mapping[str, Any]) -> str:
    """Return the unit of the rates: that of a script without a DataLoader is steps/s."""
    return str(sweep["machine"].get("rate", RATE))


def progress_line(sweep: Mapping[str, Any]) -> str:
    progress = sweep["progress"]
    left = progress["seconds_left"]
    text = f"[{progress['done']}/{progress['total']}] {progress['doing']}"
    if sweep["status"] == "running" and left is not None:
        text += f"; about {format_duration(left)} left"
    return printable(text)


def table(sweep: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table: headings, the baseline, and the variants by effect."""
    headings = tuple(_unit(sweep) if name == RATE else name for name in HEADINGS)
    cells = [headings, *rows(sweep)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return [
        printable(
            "  ".join(
                f"{cell:>{width}}" if heading in NUMBERS else f"{cell:<{width}}"
                for cell, width, heading in zip(row, widths, HEADINGS, strict=True)
            ).rstrip()
        )
        for row in cells
    ]


def closing(sweep: Mapping[str, Any]) -> list[str]:
    """Return the lines below the final table."""
    counts = Counter(str(variant["verdict"]) for variant in sweep["variants"])
    plan, best = sweep["plan"], of_best(sweep)
    lines = [
        f"{summary(counts) or 'No variant'}; {plan['steps']} steps per trial after "
        f"{plan['warmup']} warm-up steps, in fresh processes.",
        EFFECT.replace(RATE, _unit(sweep)),
    ]
    for variant in sweep["variants"]:
        if variant["reason"] and variant["reason"] not in variant["text"]:
            lines.append(f"{variant['name']}: {variant['reason']}")
    if best is not None:
        lines.append(f"Best combination: {best}")
    lines += [f"Not in it: {name}: {reason}." for name, reason in sweep["left_out"].items()]
    lines += [text for text in (sweep["throttled"], sweep["reason"]) if text]
    return [printable(line) for line in lines]
