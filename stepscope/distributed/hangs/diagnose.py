"""Read the hang of a run from the files of its ranks."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.common.formatting import format_duration
from stepscope.distributed.hangs.cases import Hang, HangCause, RankObservation, find_hang
from stepscope.distributed.hangs.record import age_s, read_record
from stepscope.run import STALE_S, RunInfo, RunStatus
from stepscope.run.rank_status import JobRank, RankStatus, ranks_of

FRESH_S = 20.0  # Maximum age of the file of a rank that hangs: hosts' clocks differ.
MAX_RANKS = 1024  # Maximum number of ranks that are read.
LOST = {
    RankStatus.FINISHED: HangCause.ENDED,
    RankStatus.STOPPED: HangCause.ENDED,
    RankStatus.FAILED: HangCause.ENDED,
    RankStatus.DEAD: HangCause.GONE,
}


def hang_of(run: RunInfo) -> Hang | None:
    """Return the hang of a run, now or when it ended; None if it did not hang.

    Lists the folder if no rank hangs, otherwise reads two small files per rank.
    """
    try:
        if not any(name.startswith("hang-rank") for name in os.listdir(run.folder)):
            return None
    except OSError:
        return None
    if run.status is RunStatus.FINISHED:
        return None
    # A run is live as long as rank 0: its other ranks may have been terminated.
    ended = not run.status.live
    ranks: list[RankObservation] = []
    for rank in ranks_of(run.folder)[:MAX_RANKS]:
        if rank.run_json.get("status") == RunStatus.PAUSED and not ended:
            return None
        if rank.status is RankStatus.ALIVE or rank.status in LOST:
            ranks.append(_observed(run.folder, rank, ended=ended))
    return find_hang(ranks, run.run_json.get("world_size") or 0, ended=ended)


def _observed(folder: Path, rank: JobRank, *, ended: bool) -> RankObservation:
    record, run_json = None, rank.run_json
    # A rank that hangs rewrites its file.
    if rank.number is not None and (ended or age_s(folder, rank.number) < FRESH_S):
        record = read_record(folder, rank.number)
    lost = LOST.get(rank.status)
    process = f"process {run_json.get('pid')} on {run_json.get('host')}"
    if rank.info is not None and lost is None:
        lost = HangCause.SILENT if rank.info.age_s > STALE_S else None
        process += f", last heartbeat {format_duration(rank.info.age_s)} ago"
    elif run_json.get("reason"):
        process += f": {rank.text.rstrip('.')}"
    step = run_json.get("step") or 0
    return RankObservation(
        rank=rank.rank,
        lost=lost,
        process=process,
        step=step,
        record=record,
        ended_at=run_json.get("ended"),
    )
