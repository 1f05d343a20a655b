"""The state of each rank of a distributed run: alive, ended, dead, or never started."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.run.rank_info import RankMetadata, find_rank, now_of, rank_numbers
from stepscope.run.status import RunKind, RunStatus

GRACE_S = 30.0  # age of a run up to which a rank without a file counts as starting


class RankState(StrEnum):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Present state of one rank of a run.

    `rank` is the global rank, `number` the folder rank, None without files. `since` is its end or
    last heartbeat in epoch seconds of its host, `age_s` the age of the heartbeat.
    """

    rank: int
    number: int | None = None
    state: RankState
    text: str
    host: str | None = None
    since: float | None = None
    age_s: float | None = None
    run_json: dict[str, Any] | None = None  # metadata of the rank; None without a file


def rank_states(folder: Path, *, now: float | None = None) -> list[RankInfo]:
    """Return every rank of a run by global rank; empty if run.json cannot be read."""
    first = find_rank(folder, 0)
    if first is None:
        return []
    numbers = rank_numbers(folder)[1:]
    files = [first, *(rank for number in numbers if (rank := find_rank(folder, number)))]
    state, text = RankState.UNRECORDED, "Its file cannot be read."
    here = {
        number: RankInfo(rank=number, number=number, state=state, text=text)
        for number in set(numbers) - {rank.number for rank in files}
    } | {rank.rank: _recorded_rank(rank) for rank in files}
    at = now_of(first.run_json) if now is None else now
    missing = missing_ranks(first, here.keys(), ended=not first.status.live, now=at)
    return [info for _, info in sorted((here | missing).items())]


def _recorded_rank(rank: RankMetadata) -> RankInfo:
    state, since, text = RankState.ALIVE, None, "Alive."
    if not rank.status.live:
        since = rank.run_json.get("ended") or rank.beat
        state, text = RankState.DEAD, "Gone without a message: killed, or the machine went down."
        if rank.terminated:
            text = "Gone, ended by SIGTERM."
        if rank.status is not RunStatus.CRASHED:
            state = RankState(rank.status.value)
            text = rank.run_json.get("reason") or f"{state.capitalize()}."
    return RankInfo(
        rank=rank.rank,
        number=rank.number,
        state=state,
        text=text,
        host=rank.run_json.get("host"),
        since=since,
        age_s=rank.age_s,
        run_json=rank.run_json,
    )


def missing_ranks(
    first: RankMetadata, here: Collection[int], *, ended: bool, now: float
) -> dict[int, RankInfo]:
    """Return the ranks without a file by global rank; `here` have one, `first` is rank 0."""
    expected, created = _expected(first), first.run_json.get("created")
    if first.run_json.get("kind") == RunKind.INIT:
        state, text = RankState.UNRECORDED, "It has not called stepscope.init, or never started."
    elif not ended and created is not None and now - created < GRACE_S:
        state, text = RankState.STARTING, "It has not written anything yet."
    else:
        state, text = RankState.NEVER_STARTED, "It has never started, or it is not watched."
    elsewhere = "It may be recorded in another folder: hosts without shared storage have one each."
    missing = {}
    for rank in sorted(set(range(first.run_json.get("world_size") or 1)) - set(here)):
        if rank not in expected:
            missing[rank] = RankInfo(rank=rank, state=RankState.ELSEWHERE, text=elsewhere)
        elif len(here) < len(expected):  # else the launcher counts in another way
            missing[rank] = RankInfo(rank=rank, state=state, text=text)
    return missing


def _expected(first: RankMetadata) -> range:
    """Return the ranks whose files belong in this folder; only `first` if counts disagree."""
    run_json, rank = first.run_json, first.rank
    size, count = run_json.get("world_size") or 1, run_json.get("local_world_size")
    local_rank = run_json.get("local_rank")
    folder_of = run_json.get("folder_of", "job")
    if folder_of == "host" and local_rank is not None and count is not None:
        start = rank - local_rank
        if 0 <= local_rank < count <= size and 0 <= start <= size - count:
            return range(start, start + count)
    return range(size) if folder_of == "job" else range(rank, rank + 1)
