"""`stepscope snapshot`: summarize a PyTorch memory snapshot, or compare two."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepscope.cli import CommandError, number_type
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.load import SnapshotError
from stepscope.memory.snapshots.open_snapshot import open_snapshot
from stepscope.memory.snapshots.stacks import own_frame, short
from stepscope.memory.snapshots.summary import SnapshotDiff, SnapshotSummary, by_module, difference
from stepscope.memory.snapshots.timeline import lasting

EXAMPLES = (
    "stepscope snapshot runs/RUN/snapshot-step-120.pickle",
    "stepscope snapshot before.pickle after.pickle --top 5",
    "stepscope snapshot FILE --json | jq '.allocations[0]'",
)
TOP = 15
MODULES = 8  # maximum number of listed modules


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="PyTorch memory snapshot (.pickle)")
    text = "a later snapshot: print what is live in only one of the two"
    add("other", type=Path, nargs="?", metavar="OTHER", help=text)
    text = f"how many allocations or changes to list (default: {TOP})"
    add("--top", type=number_type(1, 10_000, int), default=TOP, metavar="N", help=text)
    add("--json", action="store_true", help="print only a JSON object")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the summary or the comparison. Raises CommandError if a file cannot be opened."""
    paths = [path for path in (options.file, options.other) if path is not None]
    if nameless := [path for path in paths if not path.name]:
        raise CommandError(f"FILE: must be a snapshot, got the folder {nameless[0].absolute()}.")
    try:
        with tempfile.TemporaryDirectory() as spare:
            opened = [open_snapshot(path, Path(spare)) for path in paths]
    except SnapshotError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        got = error.filename or options.file
        text = f"FILE: cannot be read ({error.strerror or error}), got {got}."
        raise CommandError(text) from error
    changes = difference(*opened) if len(opened) == 2 else None
    if options.json:
        print(json.dumps(as_json(opened[0], changes, options.top), indent=1))
    else:
        lines = _text(opened[0], options.top) if changes is None else _changes(changes, options.top)
        for line in lines:
            print(printable(line))
    return 0


def as_json(summary: SnapshotSummary, changes: SnapshotDiff | None, top: int) -> dict[str, Any]:
    """Return the printed values as JSON, with whole stacks; sizes in bytes."""
    return {
        "name": summary.name,
        "file_size": summary.file_size,
        "devices": [
            _fields(one, "device", "segments", "live_blocks", "requested") | asdict(one.parts)
            for one in summary.devices
        ],
        "places": [
            _fields(one, "device", "stream", "pool") | asdict(one.parts) for one in summary.places
        ],
        "histories": [
            _fields(one, "device", "actions", "peak", "end")
            | {"seconds": one.seconds[-1] if one.seconds else None}
            for one in summary.histories
        ],
        "allocations": [
            _fields(site, "device", "size", "requested", "count")
            | {"module": summary.module(site.stack), "frames": summary.frames(site.stack)}
            for site in summary.sites[:top]
        ],
        "modules": [asdict(one) for one in by_module(summary)],
        "failed": [asdict(one) for one in summary.failed],
        "difference": changes
        and _fields(changes, "before", "after", "complete")
        | {"changes": [asdict(one) | {"more": one.more} for one in changes.changes[:top]]},
    }


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _text(summary: SnapshotSummary, top: int) -> Iterator[str]:
    yield f"{summary.name}, {format_bytes(summary.file_size)}"
    for one in summary.devices:
        yield f"GPU {one.device}: {one.parts.text}"
        yield (
            f"  {one.live_blocks:,} live blocks in {one.segments:,} segments; "
            f"{format_bytes(one.requested)} of them were requested"
        )
    yield from _history_lines(summary)
    yield from _allocation_lines(summary, top)
    modules = [one for one in by_module(summary) if one.module is not None][:MODULES]
    if modules:
        yield "By module, where the stack names one:"
        yield from (
            f"  {format_bytes(one.size):>9}  {one.count:>6,}  {one.module}" for one in modules
        )


def _history_lines(summary: SnapshotSummary) -> Iterator[str]:
    for one in summary.histories:
        lasted = f" in {lasting(one.seconds[-1])}" if one.seconds else ""
        yield (
            f"History of GPU {one.device}: {one.actions:,} actions{lasted}, peak "
            f"{format_bytes(one.peak)} requested, {format_bytes(one.end)} at its end"
        )
    for failed in summary.failed:
        free = "" if failed.device_free is None else f", {format_bytes(failed.device_free)} free"
        size = format_bytes(failed.requested)
        yield f"Out of memory on GPU {failed.device}: {size} requested{free}"
    if not summary.histories:
        yield "No history: it was taken without _record_memory_history."


def _allocation_lines(summary: SnapshotSummary, top: int) -> Iterator[str]:
    if not summary.sites:
        yield "Nothing is allocated in it."
        return
    yield "Live at the end, by the stack that allocated it:"
    for site in summary.sites[:top]:
        frames = summary.frames(site.stack)
        yield f"  {format_bytes(site.size):>9}  {site.count:>6,}  {_where(frames)}"
    left = max(0, len(summary.sites) - top) + summary.sites_left
    if left > 0:
        size = sum(site.size for site in summary.sites[top:]) + summary.size_left
        yield f"  {format_bytes(size):>9}          {left:,} further stacks"


def _changes(changes: SnapshotDiff, top: int) -> Iterator[str]:
    yield (
        f"Live: {format_bytes(changes.before)} before, {format_bytes(changes.after)} after "
        f"({_signed(changes.after - changes.before)})"
    )
    if not changes.changes:
        yield "The same stacks hold the same memory in both."
    for one in changes.changes[:top]:
        blocks = one.count_after - one.count_before
        yield f"  {_signed(one.more):>10}  {blocks:>+7,}  {_where(one.frames)}"
    if len(changes.changes) > top:
        yield f"  and {len(changes.changes) - top:,} further stacks"
    if not changes.complete:
        yield "Incomplete: one of them has more stacks than are kept."


def _where(frames: tuple[str, ...]) -> str:
    own = own_frame(frames)
    if own is None:
        return "(no stack recorded)"
    inner = "" if frames[0] == own else f", by {short(frames[0])}"
    return f"{short(own)}{inner}"


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{format_bytes(abs(size))}"
