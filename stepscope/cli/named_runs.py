"""The argument RUN, and the recorded runs that it names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.recorded_run import open_run
from stepscope.run import RunInfo
from stepscope.store.writer import recover_ended


def add_run(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add RUN as `options.runs`: one name, an optional one ("?") or several ("+")."""
    text = "name of a run folder ('stepscope runs'), a part of it, or its path"
    parser.add_argument("runs", nargs=nargs, metavar="RUN", help=text)


def named_runs(names: Sequence[str], root: Path) -> list[RunInfo]:
    """Return the named runs, with the last rows of killed processes.

    Raises RunError for an unknown run, CommandError for one that is named twice.
    """
    runs = [open_run(name, runs=root).info() for name in names]
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise CommandError("RUN: a run must be named only once. Remove the duplicates.", 2)
    for run in runs:
        recover_ended(run)
    return runs
