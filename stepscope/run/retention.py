"""Decide which run folders may be deleted, and delete them."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.files import is_own_folder
from stepscope.run.folder import RunError, is_here, is_in, recorder_of, user_name
from stepscope.run.info import RunInfo, merged, read_notes, read_run
from stepscope.run.rank_info import (
    UNREADABLE,
    RankInfo,
    rank_numbers,
    read_rank_file,
)
from stepscope.run.status import RunStatus

DAY_S = 86_400.0
_REMOVED = ".deleted-"  # Prefix of a folder that is being deleted: no run has such a name.


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run folder: its size in bytes, its end, and why it must stay, or None."""

    id: str
    size: int
    ended: float
    protected: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a run is deleted, and the reason."""

    run: StoredRun
    delete: bool
    reason: str


def decide(
    runs: Iterable[StoredRun], now: float, keep_days: float | None, max_bytes: int | None
) -> list[Decision]:
    """Return a decision for each run, the one that ended first before the others.

    Runs that ended less than `keep_days` ago stay. Of the others all are deleted, or with
    `max_bytes` only until the sizes of all runs, also of those that stay, have this sum or less.
    """
    ordered = sorted(runs, key=lambda run: (run.ended, run.id))
    total = sum(run.size for run in ordered)
    decisions = []
    for run in ordered:
        days = (now - run.ended) / DAY_S
        if run.protected is not None:
            decision = Decision(run, False, run.protected)
        elif keep_days is not None and days < keep_days:
            decision = Decision(run, False, f"ended less than {keep_days:g} days ago")
        elif max_bytes is not None and total <= max_bytes:
            decision = Decision(run, False, "within the maximum size")
        else:
            decision = Decision(run, True, f"ended {max(0.0, days):.0f} days ago")
            total -= run.size
        decisions.append(decision)
    return decisions


def stored_run(folder: Path, root: Path, *, keep_tagged: bool) -> StoredRun:
    """Return a run folder of `root` with the reason, if any, for which it must not be deleted."""
    if folder.is_symlink() or not is_in(folder, root):
        return StoredRun(folder.name, 0, 0.0, "a link, not a folder")
    size = folder_size(folder)
    try:
        run = read_run(folder)
        ranks = [read_rank_file(folder, number) for number in rank_numbers(folder)]
    except (RunError, *UNREADABLE) as error:
        return StoredRun(folder.name, size, 0.0, f"cannot be read: {error}")
    return StoredRun(run.id, size, max(map(_ended, ranks)), _protected(run, ranks, keep_tagged))


def _ended(rank: RankInfo) -> float:
    """Return the end of a rank, or its last heartbeat, in epoch seconds."""
    ended = rank.run_json.get("ended")
    return float(rank.beat if ended is None else ended)


def _protected(run: RunInfo, ranks: list[RankInfo], keep_tagged: bool) -> str | None:
    """Return why a run must not be deleted; None if no process may still write into it."""
    if not is_own_folder(run.folder) or run.run_json.get("user", user_name()) != user_name():
        return "belongs to another user"
    for rank in ranks:
        host, here = rank.run_json.get("host"), is_here(rank.run_json)
        if rank.status.live:
            return f"still {rank.status}. Stop it first"
        if rank.status is RunStatus.CRASHED and not here:
            return f"may be live on {host}: its process cannot be seen from here"
        # The process, such as a server, may go on after its run.
        if recorder_of(rank.run_json, run.folder / f"rank{rank.number}.sqlite") is not None:
            return "its last rows are being written. Try again"
    try:
        metadata = merged(run.run_json, read_notes(run.folder), run.id)
    except RunError as error:
        return str(error)
    if metadata.pinned:
        return "pinned"
    tags = metadata.tags
    return f"tagged {', '.join(tags[:5])}" if keep_tagged and tags else None


def folder_size(folder: Path) -> int:
    """Return the sum of the sizes in bytes of all files below a folder; links are not followed."""
    if folder.is_symlink():
        return folder.lstat().st_size
    total = 0
    for parent, folders, files in os.walk(folder):  # omits what cannot be read
        for name in (*folders, *files):
            with suppress(OSError):  # deleted meanwhile
                status = os.lstat(os.path.join(parent, name))
                total += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return total


def delete_run(folder: Path, root: Path, *, keep_tagged: bool) -> str | None:
    """Delete a run folder; return why it stays, if anything changed since.

    The folder is renamed first, so that no reader finds half a run. Raises OSError if it cannot be
    renamed, or if files are left.
    """
    protected = stored_run(folder, root, keep_tagged=keep_tagged).protected
    if protected is None:
        removed = root / f"{_REMOVED}{secrets.token_hex(4)}-{folder.name}"
        folder.rename(removed)
        shutil.rmtree(removed)
    return protected
