"""The sweep in a terminal: a line of progress, and a table that is drawn again as it grows."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import format_duration, printable
from trainer.lab.table import HEADINGS, NUMBERS, rows
from trainer.lab.verdict_text import EFFECT, of_best, summary


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
