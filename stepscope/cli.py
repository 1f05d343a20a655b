"""The console command `stepscope`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stepscope import __version__
from stepscope.run import RunError, read_run, run_folders


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="stepscope", description="Look at the runs that Stepscope recorded."
    )
    parser.add_argument("--version", action="version", version=f"stepscope {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    runs = commands.add_parser(
        "runs", help="list recorded runs, newest first",
        description="List the runs in STEPSCOPE_RUNS (runs/ by default), newest first.",
    )  # fmt: skip
    runs.set_defaults(run=list_runs)
    options = parser.parse_args(arguments)
    return int(options.run())


def list_runs() -> int:
    """Print a line a run: id, status, step and start; return 0."""
    root = Path(os.environ.get("STEPSCOPE_RUNS", "runs"))
    shown = 0
    for folder in run_folders(root):
        try:
            run = read_run(folder)
        except RunError as error:
            print(error, file=sys.stderr)
            continue
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
        print(f"{run.id:<48} {run.status:<9} step {run.facts.get('step', 0):>9}  {began}")
        shown += 1
    if not shown:
        print(f"No runs in {root.resolve()}. Start one on the page, or set STEPSCOPE_RUNS.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
