"""Read the hang of a run from the files of its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stepscope.common.formatting import format_duration
from stepscope.distributed.hangs.cases import Hang, HangCause, RankObservation, find_hang
from stepscope.distributed.hangs.record import age_s, read_record
from stepscope.run import STALE_S, RunInfo, RunStatus
from stepscope.run.rank_status import RankInfo, RankState, rank_states

FRESH_S = 20.0  # Maximum age of the file of a rank that hangs: hosts' clocks differ.
MAX_RANKS = 1024  # Maximum number of ranks that are read.
LOST = {
    RankState.FINISHED: HangCause.ENDED,
    RankState.STOPPED: HangCause.ENDED,
    RankState.FAILED: HangCause.ENDED,
    RankState.DEAD: HangCause.GONE,
    RankState.NEVER_STARTED: HangCause.ABSENT,
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
    for info in rank_states(run.folder)[:MAX_RANKS]:
        run_json = info.run_json or {}
        if run_json.get("status") == RunStatus.PAUSED and not ended:
            return None
        if info.state is RankState.ALIVE or info.state in LOST:
            ranks.append(_observed(run.folder, info, run_json, ended=ended))
    return find_hang(ranks, run.run_json.get("world_size") or 0, ended=ended)


def _observed(
    folder: Path, info: RankInfo, run_json: dict[str, Any], *, ended: bool
) -> RankObservation:
    record = None
    # A rank that hangs rewrites its file.
    if info.number is not None and (ended or age_s(folder, info.number) < FRESH_S):
        record = read_record(folder, info.number)
    lost = LOST.get(info.state)
    process = f"process {run_json.get('pid')} on {info.host}"
    if lost is None:
        lost = HangCause.SILENT if (info.age_s or 0.0) > STALE_S else None
        process += f", last heartbeat {format_duration(info.age_s)} ago"
    elif run_json.get("reason"):
        process += f": {info.text.rstrip('.')}"
    step = run_json.get("step") or 0
    return RankObservation(rank=info.rank, lost=lost, process=process, step=step, record=record)
