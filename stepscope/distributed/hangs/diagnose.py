"""Why a job of several ranks makes no step: who has not come, and where it is instead. Pure.

Ranks wait for each other in collectives. A collective is the same on all ranks of its group by its
number, so the ranks that have not entered the one that others wait in are those to look at. A rank
that waits itself, in a collective of another group, only passes the wait on; the one at the end of
the chain is named. Where a record is missing that the answer depends on, nothing is said.

| file                  | what it judges                                                        |
|-----------------------|-----------------------------------------------------------------------|
| `hang_record.py`      | what each rank writes while it makes no step                          |
| `hang_job.py`         | all ranks together, and words                                         |
| `hang_lost.py`        | processes that are gone, stopped, silent, ended or never came         |
| `hang_collectives.py` | who has not entered which collective, or has entered another one      |
| `hang_others.py`      | messages between two ranks, Python stacks                             |
| `hang_reading.py`     | reads the run folder                                                  |
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.distributed.hangs.causes import lost
from stepscope.distributed.hangs.hang_collectives import all_entered, collectives
from stepscope.distributed.hangs.hang_others import messages, stacks
from stepscope.distributed.hangs.job_state import Condition, Hang, Job, JobRank

COMPILING = "compiling"
"""Word of a record for what is slow and no hang."""


def judge(
    ranks: Sequence[JobRank], now: float, world_size: int | None = None, *, ended: bool = False
) -> Hang | None:
    """Return why the job makes no step at `now`; None where it makes steps or nobody can know.

    `ended` says that the job is over: its records then tell how it hung last.
    """
    job = Job(tuple(sorted(ranks, key=lambda one: one.rank)), now, world_size, ended)
    if not job.records or any(one.paused for one in ranks):
        return None
    if any(record.doing == COMPILING for record in job.records.values()):
        return None
    if not ended and _makes_steps(job):
        return None
    looks = (lost, collectives, messages, all_entered, stacks)
    return next((found for look in looks if (found := look(job)) is not None), None)


def _makes_steps(job: Job) -> bool:
    """Say whether a rank that has no record is further than those that have one.

    As the last one is that has batches left within `Join`, while the others serve it.
    """
    last = max(record.step for record in job.records.values())
    return any(
        one.record is None
        and one.condition is Condition.ALIVE
        and one.step is not None
        and one.step > last
        for one in job.ranks
    )
