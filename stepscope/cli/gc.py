"""`stepscope gc`: delete old runs of this user."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import number_type
from stepscope.common.formatting import format_bytes, printable
from stepscope.run import check_readable, retention, run_folders

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
    """Delete runs of `root`; return 1 if one cannot be deleted. Raises CommandError."""
    if options.keep_days is None and options.max_size is None:
        raise CommandError("gc: needs --keep-days or --max-size, got neither. Add one.", 2)
    if not os.path.lexists(root):
        raise CommandError(f"gc: no folder {root}. Set STEPSCOPE_RUNS to your runs.", 2)
    check_readable(root)
    decisions = retention.decide(
        [
            retention.stored_run(folder, root, keep_tagged=options.keep_tagged)
            for folder in run_folders(root)
        ],
        time.time(),
        options.keep_days,
        options.max_size,
    )
    failed, freed = False, 0
    for decision in decisions:
        word, reason = "delete" if decision.delete else "keep", decision.reason
        if decision.delete and not options.dry_run:
            folder = root / decision.run.id
            try:
                kept = retention.delete_run(folder, root, keep_tagged=options.keep_tagged)
            except OSError as error:
                failed, kept = True, f"cannot be deleted: {error}"
                print(printable(f"{decision.run.id}: {kept}"), file=sys.stderr)
            if kept is not None:
                word, reason = "keep", kept
        freed += decision.run.size if word == "delete" else 0
        size = format_bytes(decision.run.size)
        print(printable(f"{word:<6}  {decision.run.id}  {size}  {reason}"))
    total = sum(decision.run.size for decision in decisions)
    done = "would be" if options.dry_run else "were"
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
