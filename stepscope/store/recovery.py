"""Store the last rows of a killed process, and its outcome."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path

from stepscope.common.files import is_own_folder
from stepscope.run import RunInfo, RunStatus, is_own, rank_json, write_run_json
from stepscope.run.folder import is_here, recorder_of
from stepscope.run.rank_info import UNREADABLE, find_rank, numbers_with, read_run_json
from stepscope.store import StoreError, StoreWriter, store_name
from stepscope.store.blocks import STEPS, find_broken_losses
from stepscope.store.ring import RingError, read_ring, rows_after
from stepscope.store.schema import warn_once

log = logging.getLogger(__name__)

LIVE = tuple(status for status in RunStatus if status.live)


def recover_ended(run: RunInfo) -> int:
    """Store the last rows of an ended run of this host and user; return the number of steps."""
    if run.status.live or not is_own(run):
        return 0
    gained = 0
    for number in ranks_with_unstored_rows(run):
        try:
            gained += recover(run.folder, number)
        except (RingError, StoreError, OSError, sqlite3.Error) as error:
            warn_once(f"{run.folder}: the last rows could not be stored: {error}")
    return gained


def ranks_with_unstored_rows(run: RunInfo) -> list[int]:
    """Return the ranks whose ring or incomplete transaction is left in the run folder."""
    return list(dict.fromkeys(numbers_with(run.folder, "(?:ring|sqlite-journal)")))


def recover(folder: Path, rank: int = 0) -> int:
    """Move the ring of a dead process into its store and delete it; return the number of steps.

    Rolls back an incomplete transaction. Raises StoreError, RingError, OSError or sqlite3.Error if
    the ring or the store cannot be used.
    """
    path, journal = folder / f"rank{rank}.ring", folder / f"{store_name(rank)}-journal"
    has_ring = os.path.lexists(path)
    if _may_run(folder, rank) or not (has_ring or os.path.lexists(journal)):
        return 0
    data = read_ring(path) if has_ring else None
    with (
        closing(StoreWriter(folder / store_name(rank), reopen=True)) as writer,
        writer.transaction(),  # SQLite rolls an incomplete one back, and others wait
    ):
        if data is None:
            journal.unlink(missing_ok=True)  # SQLite leaves the journal of an unchanged store
            return 0
        steps = writer.append_slots(rows_after(data, writer.stored_slots()))[STEPS]
        for event in find_broken_losses(steps, set()):
            writer.add_event(event)
    path.unlink(missing_ok=True)
    with suppress(*UNREADABLE):
        run_json = read_run_json(folder, rank)
        if run_json.get("problem") is not None:  # rows that did not fit on a full disk
            write_run_json(folder, run_json | {"problem": None}, rank_json(rank))
    return len(steps)


def note_end(
    folder: Path,
    status: RunStatus,
    reason: str,
    *,
    number: int = 0,
    instead_of: Collection[str] = LIVE,
) -> None:
    """Write the outcome of a rank of this user if it has one of the statuses `instead_of`."""
    try:
        run_json = read_run_json(folder, number)
        if run_json["status"] in instead_of and is_own_folder(folder):
            ended = {"status": status, "reason": reason, "ended": time.time()}
            write_run_json(folder, run_json | ended, rank_json(number))
    except UNREADABLE as error:
        text = "stepscope: %s: rank %d: its outcome could not be written: %s"
        log.warning(text, folder.name, number, error)


def _may_run(folder: Path, rank: int) -> bool:
    """Return False if the process of a rank could be seen from here, and has ended the run."""
    info = find_rank(folder, rank)
    if info is None or info.status.live or not is_here(info.run_json):
        return True
    return recorder_of(info.run_json, folder / store_name(rank)) is not None
