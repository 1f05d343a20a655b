"""Find why a job of several ranks makes no step: which rank the others wait for, and where it is.

A collective has the same number on all ranks of its group, so the ranks that have not entered the
one that others wait in are named. A rank that itself waits in another group's collective is not:
the one at the end of the chain is. Where a record is missing that decides this, none is.

| file           | what it does                                                                |
|----------------|-----------------------------------------------------------------------------|
| `watchdog.py`  | notices in each rank that steps have stopped                                |
| `capture.py`   | collects what a rank waits in                                               |
| `record.py`    | the file that each rank writes                                              |
| `job_state.py` | the records of all ranks together, and messages                             |
| `causes.py`    | lost processes, collectives not entered, messages between ranks, stacks     |
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from stepscope.common.files import read_regular_file
from stepscope.distributed.hangs.causes import all_entered, collectives, lost, messages, stacks
from stepscope.distributed.hangs.job_state import (
    Hang,
    JobObservation,
    RankLiveness,
    RankObservation,
)
from stepscope.distributed.hangs.record import BYTES_LIMIT, REFRESH_S, HangRecord, hang_name, parse
from stepscope.run import STALE_S, RunInfo, RunStatus, pid_namespace, process_of
from stepscope.run.rank_info import now_of, wall_offset_of
from stepscope.run.rank_status import RankInfo, RankState, rank_states

COMPILING = "compiling"  # Word of a record for what is slow and no hang.


def judge(
    ranks: Sequence[RankObservation],
    now: float,
    world_size: int | None = None,
    *,
    ended: bool = False,
) -> Hang | None:
    """Return why the job makes no step at `now`; None where it makes steps or nobody can know.

    `ended` says that the job is over: its records then tell how it hung last.
    """
    job = JobObservation(tuple(sorted(ranks, key=lambda one: one.rank)), now, world_size, ended)
    if not job.records or any(one.paused for one in ranks):
        return None
    if any(record.doing == COMPILING for record in job.records.values()):
        return None
    if not ended and _makes_steps(job):
        return None
    looks = (lost, collectives, messages, all_entered, stacks)
    return next((found for look in looks if (found := look(job)) is not None), None)


def _makes_steps(job: JobObservation) -> bool:
    """Return True if a rank without a record is further than the others, as within `Join`."""
    last = max(record.step for record in job.records.values())
    return any(
        one.record is None
        and one.condition is RankLiveness.ALIVE
        and one.step is not None
        and one.step > last
        for one in job.ranks
    )


FRESH_S = 4 * REFRESH_S
"""Age of a file up to which its rank still hangs: it is written every REFRESH_S, and clocks of
several hosts differ."""
RANKS_LIMIT = 1024  # Ranks that are read.


def hang_of(run: RunInfo, now: float | None = None) -> Hang | None:
    """Return why a run makes no step, or made none when it ended; None where it did not hang.

    Costs a look at the folder where no rank hangs, otherwise two small files a rank.
    """
    try:
        if not any(name.startswith("hang-rank") for name in os.listdir(run.folder)):
            return None
    except OSError:
        return None
    # A run lives as long as rank 0, as a job does only while nobody ends the others.
    ended = not run.status.live
    if ended and run.status is RunStatus.FINISHED:
        return None
    now = now_of(run.run_json) if now is None else now
    standings = rank_states(run.folder, now=now)[:RANKS_LIMIT]
    ranks = [_job_rank(run, standing, now, ended=ended) for standing in standings]
    known = [rank for rank in ranks if rank is not None]
    size = run.run_json.get("world_size")
    is_known = type(size) is int and 1 < size <= RANKS_LIMIT
    return judge(known, now, size if is_known else None, ended=ended)


def read_record(folder: Path, number: int) -> HangRecord | None:
    """Return what a rank has written; None where there is nothing, or nothing of ours."""
    try:
        return parse(read_regular_file(folder / hang_name(number), BYTES_LIMIT))
    except (OSError, ValueError):
        return None


def _job_rank(
    run: RunInfo, standing: RankInfo, now: float, *, ended: bool
) -> RankObservation | None:
    """Return what the finder needs of a rank; None for one of which nothing can be known."""
    condition = _CONDITIONS.get(standing.state)
    if condition is None:
        return None
    number, told = standing.number, standing.run_json or {}
    record = None if number is None else read_record(run.folder, number)
    if record is not None and not ended and not _is_fresh(run, record, now):
        record = None
    age_s = standing.age_s
    if condition is RankLiveness.ALIVE:
        condition = _of_process(told, age_s)
    pid, step = told.get("pid"), told.get("step")
    has_ended = condition is RankLiveness.ENDED
    return RankObservation(
        rank=standing.rank,
        condition=condition,
        host=(standing.host or "")[:100],
        pid=pid if type(pid) is int else None,
        step=step if type(step) is int else None,
        beat_age_s=age_s,
        paused=told.get("status") == RunStatus.PAUSED and not ended,
        reason=standing.text if has_ended else None,
        record=record,
    )


def _is_fresh(run: RunInfo, record: HangRecord, now: float) -> bool:
    """Say whether a rank still hangs: it writes its file again and again."""
    try:
        written = (run.folder / hang_name(record.number)).stat().st_mtime
    except OSError:
        return False
    written -= wall_offset_of(run.run_json)
    return now - max(written, record.seen) < FRESH_S


_CONDITIONS = {
    RankState.ALIVE: RankLiveness.ALIVE,
    RankState.FINISHED: RankLiveness.ENDED,
    RankState.STOPPED: RankLiveness.ENDED,
    RankState.FAILED: RankLiveness.ENDED,
    RankState.DEAD: RankLiveness.GONE,
    RankState.NEVER_STARTED: RankLiveness.ABSENT,
}


def _of_process(told: dict[str, Any], beat_age_s: float | None) -> RankLiveness:
    """Judge a live rank's process: where it is of this machine, by what the system says of it."""
    here = told.get("host") == socket.gethostname() and told.get("pid_namespace") == pid_namespace()
    process = process_of(told) if here else None
    if process is not None:
        try:
            if process.status() == psutil.STATUS_STOPPED:
                return RankLiveness.STOPPED
        except psutil.Error:  # it ends just now, or may not be looked at
            return RankLiveness.ALIVE
    is_silent = beat_age_s is not None and beat_age_s > STALE_S
    return RankLiveness.SILENT if is_silent else RankLiveness.ALIVE
