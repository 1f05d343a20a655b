"""Ranks whose process explains a hang: gone, stopped, silent, ended, or never there; pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.common.formatting import format_duration
from stepscope.distributed.hangs.job_state import (
    NAMED,
    Cause,
    Condition,
    Hang,
    Job,
    JobRank,
    is_are,
    names,
    wait_waits,
    waited_in,
)


def lost(job: Job) -> Hang | None:
    """Name ranks whose process is gone, stopped, silent, ended, or was never there."""
    waiting = tuple(job.records)
    where = waited_in(job)
    for condition, tell in _LOST.items():
        found = [one for one in job.ranks if one.condition is condition and _counts(job, one)]
        others = tuple(rank for rank in waiting if rank not in {one.rank for one in found})
        if not found or not others:
            continue
        cause, what, next_text = tell(found)
        wait = f"; {names(others)} {wait_waits(others)} {where[0]}" if where[0] else ""
        return job.hang(
            cause, [one.rank for one in found], others, what + wait, next_text, None, where[1]
        )
    return None


def _counts(job: Job, rank: JobRank) -> bool:
    """Say whether the state of a process explains a hang: of a job that is over all are gone."""
    if job.ended:
        return rank.record is None and rank.condition is not Condition.ENDED
    if rank.condition is Condition.ENDED:
        return rank.record is None and _is_waited_for(job, rank.rank)
    return True


def _is_waited_for(job: Job, rank: int) -> bool:
    """Say whether another rank waits in what needs this one, rather than works by itself.

    Where torch has no record of it the stack of the other rank tells.
    """
    for record in job.records.values():
        if any(rank in job.members(one.group) for one in record.pending):
            return True
        if record.phase == "communication" and record.doing is None and not record.pending:
            return True
    return False


def _gone(found: Sequence[JobRank]) -> tuple[Cause, str, str]:
    who = [one.rank for one in found]
    what = f"{names(who)} {is_are(who)} gone without a word (killed, or the machine went down)"
    return Cause.GONE, what, "Look at the machine's log, such as dmesg, for what killed it."


def _stopped(found: Sequence[JobRank]) -> tuple[Cause, str, str]:
    who = [one.rank for one in found]
    where = ", ".join(f"process {one.pid} on {one.host}" for one in found[:NAMED])
    what = f"{names(who)} {is_are(who)} stopped by a signal, such as SIGSTOP ({where})"
    return Cause.STOPPED, what, f"kill -CONT {found[0].pid} lets it go on."


def _silent(found: Sequence[JobRank]) -> tuple[Cause, str, str]:
    who = [one.rank for one in found]
    first = found[0]
    age = format_duration(first.beat_age_s)
    what = (
        f"{names(who)} {'gives' if len(who) == 1 else 'give'} no sign of life for {age}: a call "
        "holds its interpreter, or its host hangs"
    )
    return Cause.SILENT, what, f"On {first.host}: py-spy dump --pid {first.pid} shows where it is."


def _over(found: Sequence[JobRank]) -> tuple[Cause, str, str]:
    who = [one.rank for one in found]
    said = f": {found[0].reason.rstrip('.')}" if found[0].reason else ""
    what = f"{names(who)} {'has' if len(who) == 1 else 'have'} ended{said}"
    return Cause.ENDED, what, "All ranks must make the same number of steps."


def _absent(found: Sequence[JobRank]) -> tuple[Cause, str, str]:
    who = [one.rank for one in found]
    has = "has" if len(who) == 1 else "have"
    what = f"{names(who)} {has} never started, or {is_are(who)} not recorded"
    return Cause.ABSENT, what, "Look at the log of its launcher."


_LOST = {
    Condition.GONE: _gone,
    Condition.STOPPED: _stopped,
    Condition.SILENT: _silent,
    Condition.ENDED: _over,
    Condition.ABSENT: _absent,
}
