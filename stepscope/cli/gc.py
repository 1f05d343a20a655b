"""`stepscope gc`: delete old runs of this user."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from pathlib import Path

from stepscope.cli import number_type
from stepscope.cli.app_process import APP
from stepscope.common.formatting import format_bytes, printable
from stepscope.run import run_folders
from stepscope.run.retention import decide, delete_run, interrupted_deletions, stored_run

EXAMPLES = (
    "stepscope gc --keep-days 30 --keep-tagged --dry-run",
    "stepscope gc --keep-days 7 --max-size 20GB",
)
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]?)(i?)B", re.IGNORECASE)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument(
        "--keep-days",
        type=number_type(0, 36_500, float),
        metavar="N",
        help="keep runs that ended less than N days ago",
    )
    parser.add_argument("--keep-tagged", action="store_true", help="keep runs that have tags")
    parser.add_argument(
        "--max-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="delete the oldest runs only until all runs need at most SIZE, such as 20GB",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the decisions; delete nothing"
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Delete runs of `root`; return 1 if one cannot be deleted, 2 for wrong usage."""
    if options.keep_days is None and options.max_size is None:
        print("gc: needs --keep-days or --max-size, got neither. Add one.", file=sys.stderr)
        return 2
    if root.resolve() == (APP / "examples").resolve():
        print(f"gc: {root} has the examples. Set STEPSCOPE_RUNS to your runs.", file=sys.stderr)
        return 2
    tagged, failed, freed = options.keep_tagged, False, 0
    runs = [stored_run(folder, root, keep_tagged=tagged) for folder in run_folders(root)]
    decisions = decide(runs, time.time(), options.keep_days, options.max_size)
    for decision in decisions:
        delete, reason = decision.delete, decision.reason
        if delete and not options.dry_run:
            try:
                kept = delete_run(root / decision.run.id, root, keep_tagged=tagged)
                delete, reason = kept is None, kept or reason
            except OSError as error:
                delete, failed = False, True
                print(f"{decision.run.id}: cannot be deleted ({error}).", file=sys.stderr)
        freed += decision.run.size if delete else 0
        size = format_bytes(decision.run.size)
        print(
            printable(f"{'delete' if delete else 'keep':<6}  {decision.run.id}  {size}  {reason}")
        )
    for path in () if options.dry_run else interrupted_deletions(root):
        shutil.rmtree(path, ignore_errors=True)
    total, done = sum(run.size for run in runs), "would be" if options.dry_run else "were"
    print(f"{format_bytes(freed)} of {format_bytes(total)} {done} deleted in {root}.")
    return int(failed)


def size_in_bytes(text: str) -> int:
    """Return a size in bytes: kB, MB, GB and TB are powers of 1000, KiB and so on of 1024.

    >>> size_in_bytes("20GB"), size_in_bytes("1.5 GiB")
    (20000000000, 1610612736)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be a number with a unit such as 20GB or 500MiB, got {text[:60]!r}."
        )
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))
