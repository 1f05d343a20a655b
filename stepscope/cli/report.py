"""`stepscope report`: runs, or a sweep, as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.common.files import atomic_write
from stepscope.compare.report_page import ReportError
from stepscope.compare.reports import run_report, sweep_report
from stepscope.lab.folder import SWEEP_JSON, SweepError, read_sweep
from stepscope.recorded_run import open_run
from stepscope.store.recovery import recover_ended

EXAMPLES = (
    "stepscope report RUN -o report.html",
    "stepscope report runs/lab/SWEEP -o sweep.html --full",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    text = "names of run folders ('stepscope runs') or their paths, or the path of one sweep"
    parser.add_argument("ids", nargs="+", metavar="RUN", help=text)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="HTML file to write"
    )
    text = "keep host names, user names, addresses and paths"
    parser.add_argument("--full", action="store_true", help=text)


def run(options: argparse.Namespace, root: Path) -> int:
    """Write the report. Raises CommandError, and RunError for an unknown run."""
    try:
        first = Path(options.ids[0])
        if len(options.ids) == 1 and (first / SWEEP_JSON).is_file():
            html = sweep_report(read_sweep(first), full=options.full)
        else:
            runs = [open_run(one, runs=root).info() for one in options.ids]
            if len({one.folder.resolve() for one in runs}) < len(runs):
                raise ReportError("RUN: a run must be named only once. Remove the duplicates.")
            for one in runs:
                recover_ended(one)  # the last rows of a killed process
            html = run_report(runs, full=options.full)
        atomic_write(options.output, html)
    except (SweepError, ReportError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        text = f"--output: cannot be written ({error.strerror or error}), got {options.output}."
        raise CommandError(text) from error
    print(f"{options.output} ({len(html.encode()) / 1000:,.0f} kB)")
    return 0
