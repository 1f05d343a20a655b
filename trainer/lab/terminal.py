"""A sweep in a terminal: a line of progress and a table, whose rows the report has too."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import format_bytes, format_duration, printable
from trainer.lab.verdict_text import EFFECT, of_best, percent, summary

HEADINGS = (
    *("setting", "verdict", "resolution", "samples/s", "step", "data wait", "peak"),
    *("loss", "rounds"),
)
NUMBERS = frozenset(HEADINGS) - {"setting", "verdict", "loss"}
"""Columns that are aligned to the right."""
_LAST = ("measuring", "undecided", "failed", "impossible")


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


class Terminal:
    """Shows each new content of a sweep on stderr.

    On a terminal the table is drawn anew over the former one. In a file it is one line a sample.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._drawn = 0

    def show(self, sweep: Mapping[str, Any]) -> None:
        """Show how far the sweep is."""
        line = progress_line(sweep)
        if not self._live:
            self._write(f"{line}\n")
            return
        width = max(20, shutil.get_terminal_size().columns)
        lines = [line, *table(sweep)]
        # A line that wraps would take two, and the next drawing would begin too low.
        text = "".join(f"{one[: width - 1]}\n" for one in lines)
        self._write(f"\x1b[{self._drawn}F\x1b[J{text}" if self._drawn else text)
        self._drawn = len(lines)

    def clear(self) -> None:
        """Remove the live table: the last one goes to stdout."""
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def progress_line(sweep: Mapping[str, Any]) -> str:
    """Return where the sweep stands in one line."""
    progress = sweep["progress"]
    left = progress["seconds_left"]
    text = f"[{progress['done']}/{progress['total']}] {progress['doing']}"
    if sweep["status"] == "running" and left is not None:
        text += f"; at most {format_duration(left)} left"
    return printable(text)


def table(sweep: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table: headings, the baseline, and the arms by their effect."""
    cells = [HEADINGS, *rows(sweep)]
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
    """Return what is said below the last table."""
    counts = Counter(str(arm["verdict"]) for arm in sweep["arms"])
    plan = sweep["plan"]
    lines = [
        f"{summary(counts) or 'No arm'}; {plan['steps']} steps a sample after {plan['warmup']} of "
        "warm-up, one process each.",
        EFFECT,
    ]
    for arm in sweep["arms"]:
        if arm["reason"] and arm["reason"] not in arm["text"]:
            lines.append(f"{arm['name']}: {arm['reason']}")
    best = of_best(sweep)
    if best is not None:
        lines.append(f"Best combination: {best}")
    for tried in sweep["combining"]:
        if not tried["kept"]:
            lines.append(f"Not in it: {tried['tried'][-1]}: {tried['reason']}.")
    if sweep["drift"] is not None:
        lines.append(sweep["drift"]["text"])
    if sweep["reason"]:
        lines.append(sweep["reason"])
    return [printable(line) for line in lines]
