"""How each rank of a distributed run stands: alive, ended, dead since when, or never started."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from stepscope.run.clocks import now_of
from stepscope.run.folder import rank_json
from stepscope.run.rank_info import NAMED, RANKS_LIMIT, RankFile, find_rank, moment, rank_numbers
from stepscope.run.status import FRESH_S, RunKind, RunStatus

GRACE_S = 30.0
"""Age of a run up to which a rank without a file may still come."""


class RankState(StrEnum):
    """How one rank stands."""

    ALIVE = "alive"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    DEAD = "dead"
    """Its process is gone without a word, or its heartbeat has stopped."""
    STARTING = "starting"
    """It has no file yet, and may still come."""
    NEVER_STARTED = "never started"
    ELSEWHERE = "elsewhere"
    """It is not of those that write into this folder: hosts without a shared disk have one each."""
    UNRECORDED = "not recorded"
    """It has no file that can be read, and need not have one: only some ranks may call init."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """One rank of a run as of now.

    `rank` is torch's number of it, `number` the one of its files in the folder (None without any).
    `since` is when it ended or showed its last sign of life, in epoch seconds of its host.
    `age_s` is the age of its last sign of life. `text` is a sentence for the page.
    """

    rank: int
    number: int | None
    state: RankState
    text: str
    host: str | None = None
    since: float | None = None
    age_s: float | None = None
    run_json: dict[str, Any] | None = None
    """What the rank says of itself; None without a file."""


def rank_states(folder: Path, *, now: float | None = None) -> list[RankStanding]:
    """Return every rank of a run by torch's number, also those that wrote nothing.

    Reads one small file a rank. Empty where run.json cannot be read.
    """
    first = find_rank(folder, 0)
    if first is None:
        return []
    here = _here(folder, first)
    ended = not first.status.live
    at = now_of(first.run_json) if now is None else now
    missing = missing_ranks(first, here.keys(), ended=ended, now=at)
    return [standing for _, standing in sorted((here | missing).items())]


def absences(folder: Path, first: RankFile, *, ended: bool) -> list[RankStanding]:
    """Return the ranks that are dead while the run lives, or that never started.

    `first` is number 0. Asked at every poll: files whose heartbeat is fresh are only looked at, and
    of the ranks without a file come only as many as are named, and one more.
    """
    beats = _beats(folder)
    expected = len(_expected(first.run_json, first.rank))
    fresh = len(beats) if ended else sum(abs(time.time() - beat) < FRESH_S for beat in beats)
    if fresh + 1 >= expected or not os.access(folder, os.R_OK):  # gone, or not to be listed
        return []
    here = _here(folder, first)
    dead = [one for one in here.values() if one.state is RankState.DEAD and not ended]
    missing = (
        one
        for one in _missing(first, here.keys(), ended=ended, now=now_of(first.run_json))
        if one.state is RankState.NEVER_STARTED
    )
    return [*sorted(dead, key=lambda one: one.rank), *islice(missing, NAMED + 1)]


def _here(folder: Path, first: RankFile) -> dict[int, RankStanding]:
    """Return the ranks with a file by torch's number; `first` is number 0."""
    numbers = rank_numbers(folder)[1:]
    files = [first, *(rank for number in numbers if (rank := find_rank(folder, number)))]
    here = {rank.rank: _standing(rank) for rank in files}
    for number in set(numbers) - {rank.number for rank in files}:
        here.setdefault(number, _unreadable(number))
    return here


def absence(absent: Sequence[RankStanding]) -> str | None:
    """Return one sentence a state on ranks that are absent; None without any."""
    said = []
    for state, end in (
        (RankState.DEAD, "gone without a word (killed, or the machine went down)"),
        (RankState.NEVER_STARTED, "missing: never started, or not watched"),
    ):
        ranks = [standing for standing in absent if standing.state is state]
        if ranks:
            said.append(f"{_named(ranks)} {end}.")
    return " ".join(said) or None


def _named(ranks: Sequence[RankStanding]) -> str:
    """Return these ranks as a subject, with their host where it is one, and "is" or "are"."""
    listed = ", ".join(str(standing.rank) for standing in ranks[:NAMED])
    more = ", …" if len(ranks) > NAMED else ""
    hosts = {standing.host for standing in ranks}
    host = next(iter(hosts)) if len(hosts) == 1 else None
    where = f" ({host})" if host else ""
    return f"Rank {listed}{where} is" if len(ranks) == 1 else f"Ranks {listed}{more}{where} are"


def _standing(rank: RankFile) -> RankStanding:
    state, since = _STATES.get(rank.status, RankState.ALIVE), None
    if state is not RankState.ALIVE:
        ended = moment(rank.run_json.get("ended"))
        since = rank.beat if ended is None else ended
    reason = rank.run_json.get("reason")
    text = {
        RankState.ALIVE: "Alive.",
        RankState.DEAD: "Gone without a message: killed, or the machine went down.",
    }.get(state, str(reason) if reason else f"{state.capitalize()}.")
    host = rank.run_json.get("host")
    return RankStanding(
        rank=rank.rank,
        number=rank.number,
        state=state,
        text=text,
        host=host if isinstance(host, str) else None,
        since=since,
        age_s=rank.age_s,
        run_json=rank.run_json,
    )


def _unreadable(number: int) -> RankStanding:
    text = "Its file cannot be read."
    return RankStanding(rank=number, number=number, state=RankState.UNRECORDED, text=text)


_ELSEWHERE = (
    "It may be recorded in another folder: hosts without shared storage each have their own."
)
_STATES = {
    RunStatus.FINISHED: RankState.FINISHED,
    RunStatus.STOPPED: RankState.STOPPED,
    RunStatus.FAILED: RankState.FAILED,
    RunStatus.CRASHED: RankState.DEAD,
}


def missing_ranks(
    first: RankFile, here: Collection[int], *, ended: bool, now: float
) -> dict[int, RankStanding]:
    """Return the ranks without a file, by torch's number; `first` is number 0, `here` are those
    with one."""
    size = _world_size(first.run_json)
    expected = _expected(first.run_json, first.rank)
    elsewhere = [
        RankStanding(rank=rank, number=None, state=RankState.ELSEWHERE, text=_ELSEWHERE)
        for rank in range(size)
        if rank not in here and rank not in expected
    ]
    found = [*elsewhere, *_missing(first, here, ended=ended, now=now)]
    return {one.rank: one for one in sorted(found, key=lambda one: one.rank)}


def _missing(
    first: RankFile, here: Collection[int], *, ended: bool, now: float
) -> Iterator[RankStanding]:
    """Yield the ranks without a file that belong into this folder."""
    run_json = first.run_json
    expected = _expected(run_json, first.rank)
    if len(here) >= len(expected):
        return  # as many as there can be: their numbers are another launcher's
    created = moment(run_json.get("created"))
    if run_json.get("kind") == RunKind.INIT:
        state, text = RankState.UNRECORDED, "It has not called stepscope.init, or never started."
    elif not ended and created is not None and now - created < GRACE_S:
        state, text = RankState.STARTING, "Waiting for its first heartbeat."
    else:
        state, text = RankState.NEVER_STARTED, "It has never started, or it is not watched."
    for rank in expected:
        if rank not in here:
            yield RankStanding(rank=rank, number=None, state=state, text=text)


def _expected(run_json: dict[str, Any], rank: int) -> range:
    """Return the ranks whose files belong into the folder of this one.

    A launcher numbers the processes of a machine one after another. Where it does not say how many
    run here, or says what cannot be, only this one is expected for certain.
    """
    size, count = _world_size(run_json), run_json.get("local_world_size")
    local_rank = run_json.get("local_rank")
    folder_of = run_json.get("folder_of", "job")
    if folder_of == "host" and type(local_rank) is int and type(count) is int:
        first = rank - local_rank
        if 0 <= local_rank < count <= size and 0 <= first <= size - count:
            return range(first, first + count)
    return range(size) if folder_of == "job" else range(rank, rank + 1)


def _world_size(run_json: dict[str, Any]) -> int:
    size = run_json.get("world_size")
    return size if type(size) is int and 0 < size <= RANKS_LIMIT else 1


def _beats(folder: Path) -> list[float]:
    """Return when the file of each rank but number 0 was last touched; 3 µs a rank."""
    found = []
    for number in rank_numbers(folder)[1:]:
        try:
            found.append(os.stat(f"{folder}/{rank_json(number)}").st_mtime)
        except OSError:
            continue  # gone, or a link to nowhere
    return found
