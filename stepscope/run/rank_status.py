"""The status of each rank of a distributed run: alive, ended, dead, or never started."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.run.rank_info import RankInfo, find_rank, now_of, rank_numbers
from stepscope.run.status import RunKind, RunStatus

GRACE_S = 30.0  # age of a run up to which a rank without a file counts as starting


class RankStatus(StrEnum):
    ALIVE = "alive"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "dead"  # crashed: its process has exited without a reason, or its heartbeat is stale
    STARTING = "starting"  # it has no file yet
    NEVER_STARTED = "never started"
    ELSEWHERE = "elsewhere"  # recorded in another folder: hosts without a shared disk have one each
    UNRECORDED = "not recorded"
    """It has no readable file, and need not have one: only some ranks may call init."""


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
    return [rank for _, rank in sorted((_missing_ranks(first, len(found)) | found).items())]


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


def _missing_ranks(first: RankInfo, recorded: int) -> dict[int, JobRank]:
    """Return all ranks as they are without a file; `recorded` ranks have one, `first` is rank 0."""
    run_json = first.run_json
    created = run_json.get("created")
    if run_json.get("kind") == RunKind.INIT:
        status, text = RankStatus.UNRECORDED, "It has not called stepscope.init, or never started."
    elif first.status.live and created is not None and now_of(run_json) - created < GRACE_S:
        status, text = RankStatus.STARTING, "It has not written anything yet."
    else:
        status, text = RankStatus.NEVER_STARTED, "It has never started, or it is not watched."
    elsewhere = "It may be recorded in another folder: hosts without shared storage have one each."
    expected = _expected(first)
    missing = {}
    for rank in range(run_json.get("world_size") or 1):
        if rank not in expected:
            missing[rank] = JobRank(rank, RankStatus.ELSEWHERE, elsewhere)
        elif recorded < len(expected):  # else the launcher counts in another way
            missing[rank] = JobRank(rank, status, text)
    return missing


def _expected(first: RankInfo) -> range:
    """Return the ranks whose files belong in this folder; only `first` if counts are unknown."""
    run_json = first.run_json
    folder_of = run_json.get("folder_of", "job")
    if folder_of == "job":
        return range(run_json.get("world_size") or 1)
    local_rank, count = run_json.get("local_rank"), run_json.get("local_world_size")
    if folder_of == "host" and local_rank is not None and count is not None:
        return range(first.rank - local_rank, first.rank - local_rank + count)
    return range(first.rank, first.rank + 1)
