"""The status of each rank of a distributed run: alive, ended, dead, or never started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.run.rank_info import RankInfo, find_rank, rank_numbers
from stepscope.run.status import RunKind, RunStatus

GRACE_S = 30.0  # age of a run up to which a rank without a file counts as starting


class RankStatus(StrEnum):
    ALIVE = "alive"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "dead"  # crashed: its process has exited without a reason, or its heartbeat is stale
    NEVER_STARTED = "never started"
    UNRECORDED = "not recorded"
    """It has no readable file, and need not have one: it may be starting, or on another host."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """Present status of one rank of a run.

    `rank` is the global rank, `number` the folder rank, None without a file. `info` is None if the
    file is missing or unreadable.
    """

    rank: int
    status: RankStatus
    text: str
    number: int | None = None
    info: RankInfo | None = None

    @property
    def run_json(self) -> dict[str, Any]:
        """Metadata of the rank; {} without a readable file."""
        return {} if self.info is None else self.info.run_json


def ranks_of(folder: Path) -> list[JobRank]:
    """Return every rank of a run by global rank; empty if run.json cannot be read."""
    first = find_rank(folder, 0)
    if first is None:
        return []
    found: dict[int, JobRank] = {}
    for number in rank_numbers(folder):
        info = first if number == 0 else find_rank(folder, number)
        if info is None:
            text = "Its file cannot be read."
            found.setdefault(number, JobRank(number, RankStatus.UNRECORDED, text, number))
        else:
            found[info.rank] = _recorded_rank(info)
    world_size = first.run_json.get("world_size") or 1
    if len(found) < world_size:  # else the launcher counts in another way
        status, text = _status_without_file(first)
        for rank in range(world_size):
            found.setdefault(rank, JobRank(rank, status, text))
    return [rank for _, rank in sorted(found.items())]


def _status_without_file(first: RankInfo) -> tuple[RankStatus, str]:
    """Return status and text of the ranks that have no file; `first` is rank 0 of the folder."""
    run_json = first.run_json
    created = run_json.get("created")
    if run_json.get("folder_of", "job") != "job":
        text = "It may be recorded in another folder: hosts without shared storage have one each."
    elif run_json.get("kind") == RunKind.INIT:
        text = "It has not called stepscope.init, or never started."
    elif first.status.live and created is not None and time.time() - created < GRACE_S:
        text = "It has not written anything yet."
    else:
        return RankStatus.NEVER_STARTED, "It has never started, or it is not watched."
    return RankStatus.UNRECORDED, text


def _recorded_rank(info: RankInfo) -> JobRank:
    if info.status.live:
        status, text = RankStatus.ALIVE, "Alive."
    elif info.status is not RunStatus.CRASHED:
        status = RankStatus(info.status.value)
        text = info.run_json.get("reason") or f"{status.capitalize()}."
    else:
        status, text = RankStatus.DEAD, "Gone without a message: killed, or the machine went down."
        if info.terminated:
            text = "Gone, ended by SIGTERM."
    return JobRank(info.rank, status, text, info.number, info)
