"""Diagnose a hang: the rank for which the others wait, and the place where it is.

A collective has the same number on all ranks of its group, so the cause is a rank that has not
entered the collective in which others wait. A rank that waits in another group's collective is not
the cause, but the rank at the end of the chain. If a necessary record is missing, no rank is named.
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
from stepscope.distributed.hangs.record import (
    BYTES_LIMIT,
    COMPILING,
    REFRESH_S,
    HangRecord,
    hang_name,
    parse,
)
from stepscope.run import STALE_S, RunInfo, RunStatus, pid_namespace, process_of
from stepscope.run.rank_info import now_of, wall_offset_of
from stepscope.run.rank_status import RankInfo, RankState, rank_states


def judge(
    ranks: Sequence[RankObservation],
    now: float,
    world_size: int | None = None,
    *,
    ended: bool = False,
) -> Hang | None:
    """Return the hang of a job at `now`, or its last one (`ended`).

    Returns None if the job makes steps, or the cause is unknown.
    """
    job = JobObservation(tuple(sorted(ranks, key=lambda one: one.rank)), now, world_size, ended)
    if not job.records or any(one.paused for one in ranks):
        return None
    if any(record.doing == COMPILING for record in job.records.values()):
        return None
    if not ended and _makes_steps(job):
        return None
    finders = (lost, collectives, messages, all_entered, stacks)
    return next((hang for finder in finders if (hang := finder(job)) is not None), None)


def _makes_steps(job: JobObservation) -> bool:
    """Return True if a rank without a record is ahead of the others, as within `Join`."""
    last = max(record.step for record in job.records.values())
    return any(
        one.record is None
        and one.condition is RankLiveness.ALIVE
        and one.step is not None
        and one.step > last
        for one in job.ranks
    )


FRESH_S = 4 * REFRESH_S  # Maximum age of the file of a rank that hangs: hosts' clocks differ.
RANKS_LIMIT = 1024  # Maximum number of ranks that are read.


def hang_of(run: RunInfo, now: float | None = None) -> Hang | None:
    """Return the hang of a run, now or when it ended; None if it did not hang.

    Lists the folder if no rank hangs, otherwise reads two small files per rank.
    """
    try:
        if not any(name.startswith("hang-rank") for name in os.listdir(run.folder)):
            return None
    except OSError:
        return None
    # A run is live as long as rank 0: its other ranks may have been terminated.
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
    """Return the untrusted record of a rank; None if it is missing or invalid."""
    try:
        return parse(read_regular_file(folder / hang_name(number), BYTES_LIMIT))
    except (OSError, ValueError):
        return None


def _job_rank(
    run: RunInfo, standing: RankInfo, now: float, *, ended: bool
) -> RankObservation | None:
    condition = _CONDITIONS.get(standing.state)
    if condition is None:
        return None
    number, run_json = standing.number, standing.run_json or {}
    record = None if number is None else read_record(run.folder, number)
    if record is not None and not ended and not _is_fresh(run, record, now):
        record = None
    age_s = standing.age_s
    if condition is RankLiveness.ALIVE:
        condition = _of_process(run_json, age_s)
    pid, step = run_json.get("pid"), run_json.get("step")
    has_ended = condition is RankLiveness.ENDED
    return RankObservation(
        rank=standing.rank,
        condition=condition,
        host=(standing.host or "")[:100],
        pid=pid if type(pid) is int else None,
        step=step if type(step) is int else None,
        beat_age_s=age_s,
        paused=run_json.get("status") == RunStatus.PAUSED and not ended,
        reason=standing.text if has_ended else None,
        record=record,
    )


def _is_fresh(run: RunInfo, record: HangRecord, now: float) -> bool:
    """Return True if a rank still hangs, and so rewrites its file."""
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


def _of_process(run_json: dict[str, Any], beat_age_s: float | None) -> RankLiveness:
    """Return the liveness of a live rank, by its process if that runs on this host."""
    place = run_json.get("host"), run_json.get("pid_namespace")
    process = process_of(run_json) if place == (socket.gethostname(), pid_namespace()) else None
    if process is not None:
        try:
            if process.status() == psutil.STATUS_STOPPED:
                return RankLiveness.STOPPED
        except psutil.Error:  # it ends just now, or access is denied
            return RankLiveness.ALIVE
    is_silent = beat_age_s is not None and beat_age_s > STALE_S
    return RankLiveness.SILENT if is_silent else RankLiveness.ALIVE
