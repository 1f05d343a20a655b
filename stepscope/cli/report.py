"""`stepscope report`: runs, or a sweep, as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import add_output, cannot_write
from stepscope.cli.named_runs import add_run, named_runs
from stepscope.common.files import atomic_write
from stepscope.compare.report_page import ReportError
from stepscope.compare.reports import run_report, sweep_report
from stepscope.lab.folder import SWEEP_JSON, SweepError, read_sweep

EXAMPLES = (
    "stepscope report RUN -o report.html",
    "stepscope report runs/lab/SWEEP -o sweep.html --full",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_run(parser, "+")
    add_output(parser, "HTML file to write", required=True)
    parser.add_argument(
        "--full", action="store_true", help="keep host names, user names, addresses and paths"
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Write the report. Raises CommandError, and RunError for an unknown run."""
    first = Path(options.runs[0])
    try:
        if (first / SWEEP_JSON).is_file():
            html = sweep_report(read_sweep(first), full=options.full)
        else:
            html = run_report(named_runs(options.runs, root), full=options.full)
        atomic_write(options.output, html)
    except (SweepError, ReportError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise cannot_write(options.output, error) from error
    print(f"{options.output} ({len(html.encode()) / 1000:,.0f} kB)")
    return 0
