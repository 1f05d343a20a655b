"""Judge which run folders may be deleted, and delete them."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.files import is_own_folder
from stepscope.run.folder import RunError, is_in, pid_namespace, process_of, user_name
from stepscope.run.info import RunInfo, read_run, restart_expected
from stepscope.run.rank_info import (
    UNREADABLE,
    RankMetadata,
    other_ranks,
    read_rank_file,
    wall_offset_of,
)
from stepscope.run.status import RunStatus

DAY_S = 86_400.0
_REMOVED = ".deleted-"
"""Prefix of a folder that is being deleted: no run has such a name."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run folder: its size in bytes, its end in epoch seconds, and why it must stay, or None."""

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
    """Return a decision for each run, the run that ended first at the beginning.

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
    size, ended = folder_size(folder), 0.0
    if folder.is_symlink() or not is_in(folder, root):
        return StoredRun(folder.name, 0, ended, "a link, not a folder")
    try:
        run = read_run(folder)
        ranks = [read_rank_file(folder, 0), *other_ranks(folder)]
    except (RunError, *UNREADABLE) as error:
        return StoredRun(folder.name, size, ended, f"cannot be read: {error}")
    last = run.run_json["heartbeat"] - wall_offset_of(run.run_json)
    ended = last if run.ended is None else run.ended
    return StoredRun(run.id, size, ended, _protected(run, ranks, keep_tagged))


def _protected(run: RunInfo, ranks: list[RankMetadata], keep_tagged: bool) -> str | None:
    """Return why a run must not be deleted; None if no process may still write into it."""
    if not is_own_folder(run.folder) or run.run_json.get("user", user_name()) != user_name():
        return "belongs to another user"
    for rank in ranks:
        host, namespace = rank.run_json.get("host"), rank.run_json.get("pid_namespace")
        here = host == socket.gethostname() and namespace in (None, pid_namespace())
        if rank.status.live:
            return f"live ({rank.status})"
        if rank.status is RunStatus.CRASHED and not here:
            return f"may be live on {host}: its process cannot be seen from here"
        if here and (process := process_of(rank.run_json)) is not None:
            return f"its process {process.pid} is alive"
    if restart_expected(run):
        return "torchrun will restart it"
    if keep_tagged and run.run_json.get("tags"):
        return f"tagged {', '.join(map(str, run.run_json['tags'][:5]))}"
    return None


def folder_size(folder: Path) -> int:
    """Return the sum of the sizes in bytes of all files below a folder; links are not followed."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # deleted meanwhile, or not readable
    return total


def delete_run(folder: Path, root: Path, *, keep_tagged: bool) -> str | None:
    """Delete a run folder; return why it stays, if anything changed since. Raises OSError.

    The folder is renamed first, so that no reader finds half a run.
    """
    protected = stored_run(folder, root, keep_tagged=keep_tagged).protected
    if protected is None:
        removed = root / f"{_REMOVED}{secrets.token_hex(4)}-{folder.name}"
        folder.rename(removed)
        shutil.rmtree(removed)
    return protected


def interrupted_deletions(root: Path) -> Iterator[Path]:
    """Yield the folders of this user whose deletion was interrupted."""
    for path in root.glob(f"{_REMOVED}*"):
        if path.is_dir() and not path.is_symlink() and is_own_folder(path):
            yield path
