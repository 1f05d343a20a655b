"""`stepscope compare`: compare runs of a change with runs of its baseline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.common.formatting import printable
from stepscope.compare import comparison
from stepscope.compare.figures import read_figures
from stepscope.lab.folder import SweepError
from stepscope.lab.gate import EXIT_CODES, markdown, parse_gate, worst
from stepscope.lab.verdict_text import signed
from stepscope.recorded_run import open_run
from stepscope.store.recovery import recover_ended

EXAMPLES = (
    "stepscope compare BASE --to NEW",
    "stepscope compare BASE1 BASE2 BASE3 --to NEW1 NEW2 NEW3 --gate step_time:+3%",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add = parser.add_argument
    add("base", nargs="+", metavar="BASE", help="run of the baseline: its folder's name or path")
    add("--to", nargs="+", required=True, metavar="NEW", help="run to compare with the baseline")
    help_ = "exit code 4 if METRIC (step_time, peak_memory, energy) rises by more than P%%"
    add("--gate", action="append", default=[], metavar="METRIC:+P%", help=help_)
    add("--force", action="store_true", help="compare other workloads, hardware or sizes too")
    add("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the comparison; return the exit code. Raises RunError for an unknown run."""
    try:
        gates = [parse_gate(text) for text in options.gate]
        runs = [open_run(name, runs=root) for name in (*options.base, *options.to)]
        if len({one.folder.resolve() for one in runs}) < len(runs):
            raise ValueError("BASE, NEW: a run must be named only once. Remove the duplicates.")
        for one in runs:
            recover_ended(one.info())
        figures = [read_figures(one.info()) for one in runs]
        found = comparison.compare_runs(figures)
        if found.obstacles and not options.force:
            reasons = "\n".join(found.obstacles)
            raise ValueError(f"The runs are not comparable. Use --force to compare.\n{reasons}")
        base, new = figures[: len(options.base)], figures[len(options.base) :]
        rows = comparison.compare_sides(base, new)
        results = comparison.check_runs(base, new, gates)
    except (ValueError, SweepError) as error:
        raise CommandError(str(error), 2) from error
    verdict = worst(results) if results else None
    code = EXIT_CODES[verdict] if verdict is not None else 0
    if options.json:
        content = asdict(found) | {"base": len(base), "sides": list(map(asdict, rows))}
        print(json.dumps(content | {"gates": list(map(asdict, results)), "verdict": verdict}))
        return code
    _print(found, rows, len(base))
    if min(len(base), len(new)) < comparison.MIN_RUNS:
        print(f"\n{comparison.NO_INTERVAL}")
    if (hint := comparison.runs_needed(base, new, rows)) is not None:
        print(f"\n{hint}")
    if verdict is not None:
        print(f"\n{markdown(results, 'Runs')}\nResult: **{verdict}** (exit code {code}).")
    return code


def _print(found: comparison.Comparison, rows: Sequence[comparison.SideRow], base: int) -> None:
    for name, ids in (("Baseline", found.runs[:base]), ("New", found.runs[base:])):
        print(printable(f"{name}: {', '.join(ids)}"))
    print(*found.obstacles, *found.notes, sep="\n")
    for title in ("configuration", "environment", "code"):
        for row in getattr(found, title):
            values = [row.shown(index) for index in range(len(found.runs))]
            sides = [dict.fromkeys(side) for side in (values[:base], values[base:])]
            if sides[0].keys() == sides[1].keys():
                continue  # such as the seeds of repeated runs
            texts = map(", ".join, sides)
            print(f"{title}: {row.label}: {' → '.join(texts)}")
    print(f"\n{'':<26}{'baseline':>18}{'new':>18}{'change':>14}  interval over runs (95% for all)")
    for one in rows:
        text = comparison.kind_of(one.key)[1]
        change = "" if one.change is None else signed(one.change)
        line = f"{one.label[:25]:<26}{text(one.base):>18}{text(one.new):>18}{change:>14}"
        if one.low is not None and one.high is not None:
            different = " (different)" if one.is_different else ""
            line += f"  {signed(one.low)} to {signed(one.high)}{different}"
        elif one.is_equal:
            line += f"  none: equal in all runs ({base} and {len(found.runs) - base})"
        print(line)
