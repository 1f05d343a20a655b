"""`stepscope compare`: compare runs of a change with runs of its baseline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import add_json
from stepscope.cli.named_runs import named_runs
from stepscope.common.formatting import printable
from stepscope.compare.comparison import (
    MIN_RUNS,
    NO_INTERVAL,
    Comparison,
    SideRow,
    check_runs,
    compare_runs,
    compare_sides,
    kind_of,
)
from stepscope.compare.figures import read_figures
from stepscope.lab.command import add_gate
from stepscope.lab.folder import SweepError
from stepscope.lab.gate import EXIT_CODES, markdown, worst
from stepscope.lab.verdict_text import signed

EXAMPLES = (
    "stepscope compare BASE --to NEW",
    "stepscope compare BASE1 BASE2 BASE3 --to NEW1 NEW2 NEW3 --gate step_time:+3%",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument(
        "base", nargs="+", metavar="BASE", help="run of the baseline: its folder's name or path"
    )
    parser.add_argument(
        "--to", nargs="+", required=True, metavar="NEW", help="run to compare with the baseline"
    )
    add_gate(parser)
    parser.add_argument(
        "--force", action="store_true", help="compare other workloads, hardware or sizes too"
    )
    add_json(parser, "print JSON instead of text")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the comparison; return the exit code. Raises RunError for an unknown run."""
    try:
        figures = [read_figures(one) for one in named_runs((*options.base, *options.to), root)]
        found = compare_runs(figures)
        if found.obstacles and not options.force:
            reasons = "\n".join(found.obstacles)
            raise ValueError(f"The runs are not comparable. Use --force to compare.\n{reasons}")
        base, new = figures[: len(options.base)], figures[len(options.base) :]
        rows = compare_sides(base, new)
        results = check_runs(base, new, options.gate)
    except (ValueError, SweepError) as error:
        raise CommandError(str(error), 2) from error
    verdict = worst(results) if results else None
    code = EXIT_CODES[verdict] if verdict is not None else 0
    if options.json:
        content = asdict(found) | {
            "base": len(base),
            "sides": [asdict(row) for row in rows],
            "gates": [asdict(result) for result in results],
            "verdict": verdict,
        }
        print(json.dumps(content))
        return code
    for line in _lines(found, rows, len(base)):
        print(printable(line))
    if min(len(base), len(new)) < MIN_RUNS:
        print(f"\n{NO_INTERVAL}")
    if verdict is not None:
        print(f"\n{markdown(results, 'Runs')}\nResult: **{verdict}** (exit code {code}).")
    return code


def _lines(found: Comparison, rows: Sequence[SideRow], base: int) -> Iterator[str]:
    yield f"Baseline: {', '.join(found.runs[:base])}"
    yield f"New: {', '.join(found.runs[base:])}"
    yield from (*found.obstacles, *found.notes)
    for title in ("configuration", "environment", "code"):
        for row in getattr(found, title):
            values = [row.shown(index) for index in range(len(found.runs))]
            old, new = dict.fromkeys(values[:base]), dict.fromkeys(values[base:])
            if old.keys() != new.keys():  # equal, for example, with the seeds of repeated runs
                yield f"{title}: {row.label}: {', '.join(old)} → {', '.join(new)}"
    yield ""
    yield f"{'':<26}{'baseline':>18}{'new':>18}{'change':>14}  interval over runs (95% for all)"
    for side in rows:
        text = kind_of(side.key)[1]
        change = "" if side.change is None else signed(side.change)
        line = f"{side.label[:25]:<26}{text(side.base):>18}{text(side.new):>18}{change:>14}"
        if side.low is not None and side.high is not None:
            different = " (different)" if side.is_different else ""
            line += f"  {signed(side.low)} to {signed(side.high)}{different}"
        elif side.is_equal:
            line += f"  none: equal in all runs ({base} and {len(found.runs) - base})"
        yield line
