"""Writes what a killed process could not: its last rows, and how it ended.

Nowhere else does a process write into a run folder that another one records into. Whoever shows or
exports an ended run calls `recover_ended`; whoever killed or started its process, `note_end`.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Collection
from pathlib import Path

from stepscope.metrics import Stream
from stepscope.recording.ring import RingError, abandoned
from stepscope.recording.rows import StepRows
from stepscope.run import (
    RunError,
    RunInfo,
    RunStatus,
    rank_json,
    read_only_reason,
    read_run,
    replacing,
    write_run_json,
)
from stepscope.run.rank_files import UNREADABLE, numbers_with, read_run_json
from stepscope.store import RunWriter, StoreError, store_name

log = logging.getLogger(__name__)

LIVE = tuple(status for status in RunStatus if status.live)

_told: set[tuple[Path, int]] = set()


def recover_ended(run: RunInfo) -> int:
    """Move the last rows of an ended run from its rings into its stores; return how many.

    There are such rows if its process was killed, or the disk was full. Does nothing to runs that
    are live, or belong to another host or user. A ring that cannot be read is kept, and the log
    says why.
    """
    if run.status.live or read_only_reason(run) is not None:
        return 0
    gained = 0
    for number in numbers_with(run.folder, "ring"):
        try:
            gained += recover(run.folder, number)
        except (RingError, StoreError, OSError, sqlite3.Error) as error:
            if (run.folder, number) not in _told:  # a page asks twice a second
                log.warning("%s: the last rows could not be stored: %s", run.id, error)
            _told.add((run.folder, number))
    return gained


def recover(folder: Path, rank: int = 0) -> int:
    """Move the ring of a dead process into its store and delete it; return the rows gained.

    Raises RingError while its process or another reader holds it, StoreError or OSError where the
    store cannot be written.
    """
    path = folder / f"rank{rank}.ring"
    if not path.exists():
        return 0
    with abandoned(path) as remains:
        writer = RunWriter(folder / store_name(rank), reopen=True)
        try:
            left = remains(writer.stored_slots())
            steps = StepRows()
            block = steps.block(left.slots, left.layouts)
            with writer.transaction():
                if len(block):
                    writer.append(Stream.STEPS, "", block)
                for broken in steps.broken:
                    writer.add_event(broken.ts, broken.step, 0, "nan", broken.text, {})
                writer.store_slots(left.end)
            path.unlink()
        finally:
            writer.close()
    if len(block):
        _note_step(folder, rank, int(block.step[-1]))
    return len(block)


def note_end(
    folder: Path, status: RunStatus, reason: str, instead_of: Collection[str] = LIVE
) -> None:
    """Write how a run ended that cannot say it itself; only over one of these statuses."""
    try:
        run_json = read_run(folder).run_json
        if run_json["status"] in instead_of:
            ended = {"status": status, "reason": reason, "ended": time.time()}
            write_run_json(folder, run_json | ended)
    except (RunError, OSError) as error:
        log.warning("stepscope: %s: its end could not be noted: %s", folder.name, error)


def _note_step(folder: Path, rank: int, step: int) -> None:
    """Write into run.json the last step that the store has now.

    The file keeps its time of change: it counts as a sign of life of the process.
    """
    path = folder / rank_json(rank)
    try:
        run_json, times = read_run_json(folder, rank), path.stat()
        run_json["step"] = max(step, int(run_json.get("step", 0)))
        with replacing(path) as part:
            part.write_text(json.dumps(run_json, indent=1))
            os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
    except UNREADABLE as error:
        log.warning("%s: could not be completed: %s", path, error)
