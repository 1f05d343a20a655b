"""Collectives that ranks wait in: who has not entered them, or has entered another one; pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.common.formatting import format_duration
from stepscope.distributed.hangs.job_state import (
    NAMED,
    Blocked,
    Cause,
    Condition,
    Hang,
    Job,
    at,
    blocked_waits,
    collective_words,
    first_in,
    is_are,
    names,
    number,
    pid_of,
    size_words,
    wait_waits,
)

PATIENCE_S = 60.0
"""How long a rank may do other work, such as a validation, before the others' waiting is told."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Operations that torch has under several names."""
EQUAL_SIZES = ("all_reduce", "reduce_scatter", "broadcast", "all_gather_base", "into_tensor")
"""Names with these parts are of operations to which all ranks give tensors of the same size."""


def collectives(job: Job) -> Hang | None:
    """Judge the collectives that ranks wait in."""
    waits = list(blocked_waits(job))
    for blocked in waits:
        different = _mismatch(job, blocked)
        if different is not None:
            return different
    for blocked in waits:
        # A rank that waits in another group's collective only passes the wait on.
        held = {rank for one in waits if one is not blocked for rank in one.entered}
        free = [rank for rank in blocked.behind if rank not in held]
        if free:
            return _not_entered(job, blocked, free)
    if waits and all(one.behind and not one.unknown for one in waits):
        return _different_order(job, waits)
    return next((late for one in waits if one.unknown and (late := _working(job, one))), None)


def all_entered(job: Job) -> Hang | None:
    """Say that a collective does not end although all have entered it."""
    complete = (one for one in blocked_waits(job) if not one.behind and not one.unknown)
    return next((found for one in complete if (found := _all_entered(job, one))), None)


def _mismatch(job: Job, blocked: Blocked) -> Hang | None:
    """Say that ranks call different things under one number."""
    forms: dict[tuple[str, int | None], list[int]] = {}
    for rank, one in blocked.entered.items():
        equal = any(part in one.operation for part in EQUAL_SIZES)
        size = one.input_bytes if equal else None
        forms.setdefault((_plain(one.operation), size), []).append(rank)
    if len(forms) < 2:
        return None
    # The fewest ranks are wrong; of equally many those without the lowest rank.
    sides = sorted(forms.items(), key=lambda side: (-len(side[1]), side[1][0]))
    odd = [rank for _, ranks in sides[1:] for rank in ranks]
    firsts = [(ranks, blocked.entered[ranks[0]]) for _, ranks in sides]
    told = "; ".join(f"{names(ranks)} {one.operation}{size_words(one)}" for ranks, one in firsts)
    what = f"the ranks call different collectives as {number(blocked)}: {told}"
    return job.hang(
        Cause.MISMATCH,
        sorted(odd),
        sorted(sides[0][1]),
        what,
        "All ranks must call the same operations with the same sizes in the same order. "
        f"{at(job, odd[0])}".strip(),
        "communication",
        blocked,
    )


def _plain(operation: str) -> str:
    """Return an operation without its variants: "_all_gather_base" is an all_gather."""
    return next((name for name in KINDS if name in operation), operation)


def _not_entered(job: Job, blocked: Blocked, late: Sequence[int]) -> Hang:
    entered = first_in(blocked)
    assert entered is not None
    came = sorted(blocked.entered)
    first = job.records[came[0]]
    created_s = blocked.entered[came[0]].created_s
    ago_s = max(0.0, first.seen - created_s)
    ago = "" if job.ended or not created_s else f" {format_duration(ago_s)} ago"
    what = (
        f"{names(late)} {job.has if len(late) == 1 else job.have} not entered "
        f"{collective_words(blocked, entered)}, which {names(came)} entered"
    )
    phase = job.records[late[0]].phase
    place = at(job, late[0])
    next_text = (
        f"Look at what rank {late[0]} {'did' if job.ended else 'does'} there."
        if place
        else f"py-spy dump --pid {pid_of(job, late[0])} shows where rank {late[0]} is."
    )
    where = f". {place.rstrip('.')}" if place else ""
    told = f"{what}{ago}{where}"
    return job.hang(
        Cause.NOT_ENTERED, late, came, what + where, next_text, phase, blocked, told=told
    )


def _different_order(job: Job, chained: Sequence[Blocked]) -> Hang:
    told = []
    for one in chained[:NAMED]:
        entered = first_in(one)
        if entered is not None:
            told.append(f"{names(sorted(one.entered))} in {collective_words(one, entered)}")
    ranks = sorted({rank for one in chained for rank in one.entered})
    what = f"ranks wait for each other: {'; '.join(told)}"
    return job.hang(
        Cause.ORDER,
        ranks,
        ranks,
        what,
        "All ranks must call the collectives of their groups in the same order.",
        "communication",
        chained[0],
    )


def _all_entered(job: Job, blocked: Blocked) -> Hang | None:
    entered = first_in(blocked)
    if entered is None:
        return None
    ranks = sorted(blocked.entered)
    what = (
        f"{names(ranks)} {'has' if len(ranks) == 1 else 'have all'} entered "
        f"{collective_words(blocked, entered)}, and it does not end"
    )
    return job.hang(
        Cause.ALL_ENTERED,
        ranks,
        ranks,
        what,
        "Look for errors of the network or of a GPU; NCCL_DEBUG=INFO tells more. A kernel that "
        "was launched before may not end either.",
        "communication",
        blocked,
    )


def _working(job: Job, blocked: Blocked) -> Hang | None:
    """Name ranks that are alive and have written nothing: they do other work, such as validation.

    Only after PATIENCE_S, for others may wait rightly meanwhile.
    """
    entered = first_in(blocked)
    unknown = [job.of(rank) for rank in blocked.unknown]
    busy = [one for one in unknown if one is not None and one.condition is Condition.ALIVE]
    if entered is None or len(busy) < len(unknown) or job.silent_s < PATIENCE_S or job.ended:
        return None
    if any(one.record is not None for one in busy):
        return None  # it has a record, without its collectives
    who, came = [one.rank for one in busy], sorted(blocked.entered)
    what = (
        f"{names(came)} {wait_waits(came)} in {collective_words(blocked, entered)} for "
        f"{names(who)}, which {is_are(who)} at work on something that is no step"
    )
    next_text = "A validation or a checkpoint on one rank holds the others up; do it on all."
    return job.hang(Cause.NOT_ENTERED, who, came, what, next_text, None, blocked)
