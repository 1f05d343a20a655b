"""A sweep as a table in a terminal, as CSV, and as a self-contained HTML page.

The folder of a sweep may be foreign, so every text is escaped. The page loads nothing.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from stepscope.common.formatting import (
    format_bytes,
    format_duration,
    format_short_time,
    printable,
    three_digits,
)
from trainer.lab.verdict_text import EFFECT, of_best, percent, summary

HEADINGS = (
    *("setting", "verdict", "resolution", "samples/s", "step", "data wait", "peak"),
    *("loss", "rounds"),
)
NUMBERS = frozenset(HEADINGS) - {"setting", "verdict", "loss"}
"""Right-aligned columns."""
_LAST = ("measuring", "undecided", "failed", "impossible")


def ordered(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the variants, the largest effect first and those without a verdict last."""

    def place(arm: Mapping[str, Any]) -> tuple[int, float]:
        behind = _LAST.index(arm["verdict"]) + 1 if arm["verdict"] in _LAST else 0
        return behind, -(arm["effect"] or 0.0)

    return sorted(sweep["arms"], key=place)


def rows(sweep: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the baseline and of each variant."""
    baseline = sweep["baseline"]
    found: list[tuple[str, ...]] = [
        ("baseline", baseline["label"], "", *_metrics(baseline), "", str(baseline["rounds"]))
    ]
    for arm in ordered(sweep):
        resolution = arm["resolution"]
        found.append(
            (
                str(arm["name"]),
                str(arm["text"]),
                "" if resolution is None else percent(float(resolution)),
                *_metrics(arm),
                str(arm["loss"]["text"]) if arm["effect"] is not None else "",
                str(arm["rounds"]),
            )
        )
    return found


def _metrics(arm: Mapping[str, Any]) -> tuple[str, str, str, str]:
    metrics = arm["metrics"]
    rate, peak = metrics["samples_per_sec"], metrics["peak_allocated"]
    step, wait = (
        "" if metrics[name] is None else format_short_time(metrics[name])
        for name in ("step_time", "data_wait")
    )
    if rate is None:
        return "", step, wait, ""
    peak = metrics["peak_process"] if peak is None else peak
    return three_digits(rate), step, wait, format_bytes(peak)


class Terminal:
    """Prints each new content of a sweep on stderr.

    A terminal has one table, drawn again each time; a file has one line per trial.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._drawn = 0

    def show(self, sweep: Mapping[str, Any]) -> None:
        """Print the progress of the sweep."""
        line = progress_line(sweep)
        if not self._live:
            self._write(f"{line}\n")
            return
        width = max(20, shutil.get_terminal_size().columns)
        lines = [line, *table(sweep)]
        # Without wrapped lines, so that the number of lines is the height of the table.
        text = "".join(f"{one[: width - 1]}\n" for one in lines)
        self.clear()
        self._write(text)
        self._drawn = len(lines)

    def clear(self) -> None:
        """Remove the live table."""
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def progress_line(sweep: Mapping[str, Any]) -> str:
    """Return the progress of a sweep in one line."""
    progress = sweep["progress"]
    left = progress["seconds_left"]
    text = f"[{progress['done']}/{progress['total']}] {progress['doing']}"
    if sweep["status"] == "running" and left is not None:
        text += f"; at most {format_duration(left)} left"
    return printable(text)


def table(sweep: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table: headings, the baseline, and the variants by effect."""
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
    """Return the lines below the final table."""
    counts = Counter(str(arm["verdict"]) for arm in sweep["arms"])
    plan, best, drift = sweep["plan"], of_best(sweep), sweep["drift"]
    lines = [
        f"{summary(counts) or 'No variant'}; {plan['steps']} steps per trial after "
        f"{plan['warmup']} warm-up steps, one process each.",
        EFFECT,
    ]
    for arm in sweep["arms"]:
        if arm["reason"] and arm["reason"] not in arm["text"]:
            lines.append(f"{arm['name']}: {arm['reason']}")
    lines += [f"Best combination: {best}"] if best is not None else []
    for tried in sweep["combining"]:
        if not tried["kept"]:
            lines.append(f"Not in it: {tried['tried'][-1]}: {tried['reason']}.")
    lines += filter(None, (drift and drift["text"], sweep["reason"]))
    return [printable(line) for line in lines]


COLUMNS = ("name", "label", "verdict", "effect", "low", "high", "resolution", "rounds", "reason")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(sweep: Mapping[str, Any]) -> str:
    """Return a row for the baseline and each variant; units are those of sweep.json.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    metrics = list(sweep["baseline"]["metrics"])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *metrics, "loss_verdict"])
    for arm in (sweep["baseline"], *ordered(sweep)):
        cells = [arm.get(column) for column in COLUMNS]
        cells += [arm["metrics"].get(metric) for metric in metrics]
        cells.append(arm.get("loss", {}).get("verdict"))
        writer.writerow(
            f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
            for cell in cells
        )
    return out.getvalue()


def to_html(sweep: Mapping[str, Any]) -> str:
    """Return the report as one page without scripts and external files."""
    title = escape(f"Lab: {sweep['workload']}, {sweep['id']}")
    facts = {name: sweep[name] for name in ("id", "plan", "machine")}
    body = [
        f"<h1>{title}</h1>",
        *_paragraphs(sweep),
        "<h2>Effects on samples/s</h2>",
        f"<p>{escape(EFFECT)}</p>",
        effects_svg(ordered(sweep), float(sweep["plan"]["margin"])),
        "<h2>Settings</h2>",
        _table(HEADINGS, rows(sweep)),
        *_reasons(sweep),
        *_best(sweep),
        "<h2>Rounds</h2>",
        _rounds(sweep),
        "<h2>Plan and machine</h2>",
        f"<pre>{escape(json.dumps(facts, indent=1, ensure_ascii=False))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _paragraphs(sweep: Mapping[str, Any]) -> list[str]:
    plan, machine = sweep["plan"], sweep["machine"]
    try:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(sweep["created"])))
    except (OverflowError, ValueError, TypeError, OSError):
        began = "at an unknown time"
    texts = [
        f"{sweep['status']}{': ' + str(sweep['reason']) if sweep['reason'] else ''}. "
        f"Started {began} on {machine.get('device') or 'an unknown device'}, "
        f"torch {machine.get('torch') or '?'}.",
        f"Baseline: {sweep['baseline']['label']}. Each trial is a fresh process with "
        f"{plan['steps']} measured steps after {plan['warmup']} warm-up steps. Each round has one "
        f"trial of every undecided variant and {plan.get('baselines', 1)} of the baseline, in "
        f"random order. Looks after rounds {', '.join(map(str, plan['looks']))}: moderated t on "
        f"log ratios to the baseline of the round, at {100 * plan['alpha']:g}% for all variants "
        f"and looks together. The minimum effect is {100 * plan['margin']:g}%. A loss is equal if "
        f"its interval is within ±{100 * plan.get('same', 0.03):g}%.",
    ]
    if sweep["drift"] is not None:
        texts.append(sweep["drift"]["text"])
    return [f"<p>{escape(text)}</p>" for text in texts]


def _list(items: Iterable[str]) -> list[str]:
    return ["<ul>", *(f"<li>{item}</li>" for item in items), "</ul>"]


def _reasons(sweep: Mapping[str, Any]) -> list[str]:
    items = []
    for arm in ordered(sweep):
        if arm["reason"]:
            name = str(arm["name"])
            # The reason of a problem begins with the field, which is often the variant's name.
            reason = str(arm["reason"]).removeprefix(f"{name}: ")
            items.append(f"<b>{escape(name)}</b>: {escape(reason)}")
    return ["<h2>Reasons</h2>", *_list(items)] if items else []


def _best(sweep: Mapping[str, Any]) -> list[str]:
    best, tried, text = sweep["best"], sweep["combining"], of_best(sweep)
    if best is None and not tried:
        return []
    rounds = "" if best is None else f" Confirmation rounds: {best['rounds']}."
    items = (
        f"{' + '.join(map(str, one['tried']))}: {'kept' if one['kept'] else 'left out'}, "
        f"{one['reason']}"
        for one in tried
    )
    paragraph = [] if text is None else [f"<p>{escape(text + rounds)}</p>"]
    return ["<h2>Best combination</h2>", *paragraph, *_list(map(escape, items))]


_OF_A_ROUND = ("round", "setting", "samples/s", "loss", "SM clock, MHz", "power, W", "throttled")
_NUMBERS = NUMBERS | {"SM clock, MHz", "power, W"}
_FORMS = {"samples_per_sec": ",.4g", "loss": ".4g", "sm_clock": ".0f", "power": ".0f"}


def _rounds(sweep: Mapping[str, Any]) -> str:
    cells = []
    for one in sweep["rounds"]:
        for name in one["order"]:
            trial = one["samples"][name]
            numbers = [
                format(trial[key], form) if isinstance(trial[key], int | float) else ""
                for key, form in _FORMS.items()
            ]
            text = f"{one['phase']} {one['round']}"
            cells.append((text, str(name), *numbers, str(trial["throttle"] or "")))
    table = _table(_OF_A_ROUND, cells)
    return f"<details><summary>{len(cells)} trials</summary>{table}</details>"


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    number = [' class="number"' if text in _NUMBERS else "" for text in heads]

    def row(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(cells, number, strict=True)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag[:2]}>" for cell, kind in pairs)

    lines = [row('th scope="col"', heads), *(row("td", cells) for cells in body)]
    all_rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>{all_rows}</table></div>'


ROW, LEFT, WIDTH, RIGHT = 26, 250, 470, 340
MAX_NAME = 34  # Characters.


def effects_svg(arms: Sequence[Mapping[str, Any]], margin: float) -> str:
    """Return the effects with their intervals as SVG; the band is the minimum effect."""
    shown = [arm for arm in arms if arm["effect"] is not None and arm["low"] is not None]
    if not shown:
        return "<p>No effect was measured.</p>"
    low = min(-2 * margin, *(float(arm["low"]) for arm in shown))
    high = max(2 * margin, *(float(arm["high"]) for arm in shown))
    # The interval of a variant after two rounds would hide all others.
    low, high = max(low, -1.0), min(high, 2 * max(0.1, *(abs(arm["effect"]) for arm in shown)))

    def x(effect: float) -> float:
        return LEFT + WIDTH * float((min(max(effect, low), high) - low) / (high - low))

    height = ROW * (len(shown) + 1)
    parts = [
        f'<rect class="margin" x="{x(-margin):.1f}" y="0" width="{x(margin) - x(-margin):.1f}" '
        f'height="{height - ROW}"/>',
        f'<line class="zero" x1="{x(0):.1f}" y1="0" x2="{x(0):.1f}" y2="{height - ROW}"/>',
        f'<text class="axis" x="{x(0):.1f}" y="{height - 8}" text-anchor="middle">0%</text>',
        f'<text class="axis" x="{LEFT}" y="{height - 8}">{100 * low:.0f}%</text>',
        f'<text class="axis" x="{LEFT + WIDTH}" y="{height - 8}" text-anchor="end">'
        f"{100 * high:.0f}%</text>",
    ]
    for row, arm in enumerate(shown):
        y = ROW * row + ROW / 2
        kind, text = escape(str(arm["verdict"])), escape(str(arm["text"]))
        name = str(arm["name"])
        name = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
        left, middle, right = (f"{x(arm[key]):.1f}" for key in ("low", "effect", "high"))
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>',
            f'<line class="{kind}" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>',
            f'<circle class="{kind}" cx="{middle}" cy="{y}" r="4"/>',
            f'<text x="{LEFT + WIDTH + 10}" y="{y + 4}">{text}</text>',
        ]
    width = LEFT + WIDTH + RIGHT
    return (
        f'<div class="wide"><svg viewBox="0 0 {width} {height}" role="img" width="{width}" '
        f'aria-label="Effect of each setting with its interval">{"".join(parts)}</svg></div>'
    )


_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #59636e; --line: #d1d9e0;
  --page: #fff; --up: #0a7d3c; --down: #b3261e; --band: #eaeef2; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9198a1;
  --line: #3d444d; --page: #0d1117; --up: #3fb950; --down: #ff7b72; --band: #21262d; } }
body { background: var(--page); color: var(--text); margin: 0;
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .75rem .25rem 0;
  text-align: left; vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; font-size: 12px; }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; }
svg text.axis { fill: var(--faint); }
svg line { stroke: var(--faint); stroke-width: 2; } svg circle { fill: var(--faint); }
svg line.zero { stroke-width: 1; } svg rect.margin { fill: var(--band); }
svg line.faster { stroke: var(--up); } svg circle.faster { fill: var(--up); }
svg line.slower { stroke: var(--down); } svg circle.slower { fill: var(--down); }
"""
