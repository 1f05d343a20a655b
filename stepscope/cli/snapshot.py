"""`stepscope snapshot`: list the live allocations of a memory snapshot, or compare two."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import number_type
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.open_snapshot import SnapshotError, open_snapshot
from stepscope.memory.snapshots.summary import (
    MAX_STACKS,
    SnapshotDiff,
    SnapshotSummary,
    difference,
    where,
)

EXAMPLES = (
    "stepscope snapshot runs/RUN/snapshot-step-120.pickle",
    "stepscope snapshot before.pickle after.pickle --top 5",
)
TOP = 15


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="PyTorch memory snapshot (.pickle)")
    parser.add_argument(
        "other",
        type=Path,
        nargs="?",
        metavar="OTHER",
        help="a later snapshot: print what is live in only one of the two",
    )
    parser.add_argument(
        "--top",
        type=number_type(1, 10_000, int),
        default=TOP,
        metavar="N",
        help=f"how many allocations or changes to list (default: {TOP})",
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the summary or the comparison. Raises CommandError if a file cannot be opened."""
    summary = _open(options.file)
    changes = None
    if options.other is not None:
        changes = difference(summary, _open(options.other))
    if changes is None:
        lines = _summary_lines(options.file.name, summary, options.top)
    else:
        lines = _change_lines(changes, options.top)
    for line in lines:
        print(printable(line))
    return 0


def _open(path: Path) -> SnapshotSummary:
    if not path.name:
        raise CommandError(f"FILE: must be a snapshot, got the folder {path.absolute()}.")
    try:
        return open_snapshot(path)
    except SnapshotError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        text = f"FILE: cannot be read ({error.strerror or error}), got {error.filename or path}."
        raise CommandError(text) from error


def _summary_lines(name: str, summary: SnapshotSummary, top: int) -> Iterator[str]:
    yield (
        f"{name}: {format_bytes(summary.allocated)} live in {summary.blocks:,} blocks, of "
        f"{format_bytes(summary.reserved)} reserved"
    )
    devices = {stack.device for stack in summary.stacks}
    shown = summary.stacks[:top]
    for stack in shown:
        gpu = f"  GPU {stack.device}" if len(devices) > 1 else ""
        yield f"  {format_bytes(stack.size):>9}  {stack.blocks:>6,}{gpu}  {where(stack.frames)}"
    left = summary.stack_count - len(shown)
    if left:
        size = summary.allocated - sum(stack.size for stack in shown)
        yield f"  {format_bytes(size):>9}          {left:,} further stacks"


def _change_lines(changes: SnapshotDiff, top: int) -> Iterator[str]:
    yield (
        f"Live: {format_bytes(changes.before)} before, {format_bytes(changes.after)} after "
        f"({_signed(changes.after - changes.before)})"
    )
    if not changes.changes:
        yield "The same stacks hold the same memory in both."
    for change in changes.changes[:top]:
        yield f"  {_signed(change.size):>10}  {change.blocks:>+7,}  {where(change.frames)}"
    if len(changes.changes) > top:
        yield f"  and {len(changes.changes) - top:,} further stacks"
    if not changes.complete:
        yield f"Only the {MAX_STACKS:,} largest stacks of each snapshot are compared."


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{format_bytes(abs(size))}"
