"""The state of each rank of a distributed run: alive, ended, dead, or never started."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.run.folder import rank_json
from stepscope.run.rank_info import RankMetadata, find_rank, names, now_of, rank_numbers
from stepscope.run.status import FRESH_S, RunKind, RunStatus

GRACE_S = 30.0  # age of a run up to which a rank without a file may still come


class RankState(StrEnum):
    """State of one rank."""

    ALIVE = "alive"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "dead"  # its process has exited without a reason, or its heartbeat has stopped
    STARTING = "starting"  # it has no file yet, and may still come
    NEVER_STARTED = "never started"
    ELSEWHERE = "elsewhere"  # recorded in another folder: hosts without a shared disk have one each
    UNRECORDED = "not recorded"
    """It has no file that can be read, and need not have one: only some ranks may call init."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The present state of one rank of a run.

    `rank` is torch's number, `number` that of its files in the folder, None without any. `since`
    is its end or last sign of life in epoch seconds of its host, `age_s` the age of that sign.
    """

    rank: int
    number: int | None
    state: RankState
    text: str
    host: str | None = None
    since: float | None = None
    age_s: float | None = None
    run_json: dict[str, Any] | None = None  # the file of the rank; None without one


_ELSEWHERE = (
    "It may be recorded in another folder: hosts without shared storage each have their own."
)


def rank_states(folder: Path, *, now: float | None = None) -> list[RankInfo]:
    """Return every rank of a run by torch's number; empty if run.json cannot be read."""
    first = find_rank(folder, 0)
    if first is None:
        return []
    numbers = rank_numbers(folder)[1:]
    files = [first, *(rank for number in numbers if (rank := find_rank(folder, number)))]
    state, text = RankState.UNRECORDED, "Its file cannot be read."
    here = {
        number: RankInfo(rank=number, number=number, state=state, text=text)
        for number in set(numbers) - {rank.number for rank in files}
    } | {rank.rank: _standing(rank) for rank in files}
    at = now_of(first.run_json) if now is None else now
    missing = missing_ranks(first, here.keys(), ended=not first.status.live, now=at)
    return [standing for _, standing in sorted((here | missing).items())]


def absences(folder: Path, first: RankMetadata, *, ended: bool) -> list[RankInfo]:
    """Return the ranks that died while the run is live, or never started; `first` is number 0."""
    beats = _beats(folder)
    fresh = len(beats) if ended else sum(abs(time.time() - beat) < FRESH_S for beat in beats)
    expected = len(_expected(first))
    if fresh + 1 >= expected or not os.access(folder, os.R_OK):  # deleted, or not readable
        return []
    absent = {RankState.NEVER_STARTED} if ended else {RankState.NEVER_STARTED, RankState.DEAD}
    return [one for one in rank_states(folder) if one.state in absent]


def absence(absent: Sequence[RankInfo]) -> str | None:
    """Return one sentence for each state of absent ranks; None without any."""
    sentences = []
    for state, end in (
        (RankState.DEAD, "gone without a word (killed, or the machine went down)"),
        (RankState.NEVER_STARTED, "missing: never started, or not watched"),
    ):
        ranks = [one for one in absent if one.state is state]
        hosts = {one.host for one in ranks}
        where = f" ({ranks[0].host})" if len(hosts) == 1 and ranks[0].host else ""
        if ranks:
            sentences.append(f"{names([one.rank for one in ranks], where=where)} {end}.")
    return " ".join(sentences) or None


def _standing(rank: RankMetadata) -> RankInfo:
    state, since = RankState.ALIVE, None
    if not rank.status.live:
        crashed = rank.status is RunStatus.CRASHED
        state = RankState.DEAD if crashed else RankState(rank.status.value)
        since = rank.run_json.get("ended") or rank.beat
    text = {
        RankState.ALIVE: "Alive.",
        RankState.DEAD: "Gone without a message: killed, or the machine went down.",
    }.get(state, rank.run_json.get("reason") or f"{state.capitalize()}.")
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
    """Return the ranks but `here` by torch's number; `first` is number 0."""
    expected, created = _expected(first), first.run_json.get("created")
    if first.run_json.get("kind") == RunKind.INIT:
        state, text = RankState.UNRECORDED, "It has not called stepscope.init, or never started."
    elif not ended and created is not None and now - created < GRACE_S:
        state, text = RankState.STARTING, "It has not written anything yet."
    else:
        state, text = RankState.NEVER_STARTED, "It has never started, or it is not watched."
    # As many files as expected ranks: the launcher counts in another way.
    all_here = len(here) >= len(expected)
    missing = {}
    for rank in range(first.run_json.get("world_size") or 1):
        if rank in here or (rank in expected and all_here):
            continue
        is_ours = rank in expected
        why = (state, text) if is_ours else (RankState.ELSEWHERE, _ELSEWHERE)
        missing[rank] = RankInfo(rank=rank, number=None, state=why[0], text=why[1])
    return missing


def _expected(first: RankMetadata) -> range:
    """Return the ranks whose files belong into this one's folder; this one if numbers are odd."""
    run_json, rank = first.run_json, first.rank
    size, count = run_json.get("world_size") or 1, run_json.get("local_world_size")
    local_rank = run_json.get("local_rank")
    folder_of = run_json.get("folder_of", "job")
    if folder_of == "host" and local_rank is not None and count is not None:
        start = rank - local_rank
        if 0 <= local_rank < count <= size and 0 <= start <= size - count:
            return range(start, start + count)
    return range(size) if folder_of == "job" else range(rank, rank + 1)


def _beats(folder: Path) -> list[float]:
    """Return when the file of each rank but number 0 was last touched; 3 µs a rank."""
    found = []
    for number in rank_numbers(folder)[1:]:
        with contextlib.suppress(OSError):  # deleted, or a link to nowhere
            found.append(os.stat(f"{folder}/{rank_json(number)}").st_mtime)
    return found
