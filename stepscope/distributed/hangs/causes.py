"""Find the cause of a hang: lost processes, collectives, messages, stacks. Pure; no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepscope.common.formatting import format_duration
from stepscope.distributed import NAMED, ranks_text
from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.job_state import (
    BlockedCollective,
    Hang,
    HangCause,
    JobObservation,
    RankLiveness,
    RankObservation,
    at,
    blocked_waits,
    size_words,
    subject,
    where,
)


def lost(job: JobObservation) -> Hang | None:
    """Return the hang caused by ranks whose process is not alive."""
    blocked = next(blocked_waits(job), None)
    for condition, (cause, what, next_text) in _LOST.items():
        lost_ranks = [one for one in job.ranks if one.condition is condition and _counts(job, one)]
        ranks = [one.rank for one in lost_ranks]
        others = [rank for rank in job.records if rank not in ranks]
        if ranks and others:
            words = _words(lost_ranks)
            text = what.format_map(words)
            if blocked is not None:
                text += f"; {subject(others, 'waits', 'wait')} in {blocked.words}"
            return job.hang(cause, ranks, others, text, next_text.format_map(words), None, blocked)
    return None


def _counts(job: JobObservation, rank: RankObservation) -> bool:
    """Return True if the state of a process explains a hang; after a job all have exited."""
    if job.ended:
        return rank.record is None and rank.condition is not RankLiveness.ENDED
    if rank.condition is RankLiveness.ENDED:
        return rank.record is None and _is_waited_for(job, rank.rank)
    return True


def _is_waited_for(job: JobObservation, rank: int) -> bool:
    """Return True if another rank waits for this one, by its collectives or else its stack."""
    for record in job.records.values():
        if any(rank in job.members(one.group) for one in record.pending):
            return True
        if record.phase == "communication" and record.doing is None and not record.pending:
            return True
    return False


_LOST = {
    RankLiveness.GONE: (
        HangCause.GONE,
        "{who_is} gone without an exit record (killed, or the host failed)",
        "Check the host's log, such as dmesg, for the reason.",
    ),
    RankLiveness.STOPPED: (
        HangCause.STOPPED,
        "{who_is} stopped by a signal, such as SIGSTOP ({processes})",
        "Resume it with kill -CONT {pid}.",
    ),
    RankLiveness.SILENT: (
        HangCause.SILENT,
        "{who_has} not responded for {age}: a call holds the GIL, or its host hangs",
        "On {host}: py-spy dump --pid {pid} shows where it is.",
    ),
    RankLiveness.ENDED: (
        HangCause.ENDED,
        "{who_has} ended{reason}",
        "All ranks must run the same number of steps.",
    ),
    RankLiveness.ABSENT: (
        HangCause.ABSENT,
        "{who_has} never started, or {is_} not recorded",
        "Check its launcher's log.",
    ),
}
"""Cause, sentence without its end, and recommendation, in the order of the search."""


def _words(lost_ranks: Sequence[RankObservation]) -> dict[str, object]:
    who, first = [one.rank for one in lost_ranks], lost_ranks[0]
    return {
        "who_is": subject(who, "is", "are"),
        "who_has": subject(who, "has", "have"),
        "is_": "is" if len(who) == 1 else "are",
        "processes": ", ".join(f"process {one.pid} on {one.host}" for one in lost_ranks[:NAMED]),
        "age": format_duration(first.beat_age_s),
        "host": first.host,
        "pid": first.pid,
        "reason": f": {first.reason.rstrip('.')}" if first.reason else "",
    }


PATIENCE_S = 60.0  # Time for which a rank may do other work, such as a validation.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # With several names in torch.
EQUAL_SIZES = ("all_reduce", "reduce_scatter", "broadcast", "all_gather_base", "into_tensor")
"""Parts of the names of operations whose tensors have the same size on all ranks."""


def collectives(job: JobObservation) -> Hang | None:
    """Return the hang in collectives that some ranks have not entered, or not alike."""
    waits = list(blocked_waits(job))
    for blocked in waits:
        different = _mismatch(job, blocked)
        if different is not None:
            return different
    for blocked in waits:
        # A rank that waits in another group's collective is not the cause.
        held = {rank for one in waits if one is not blocked for rank in one.entered}
        free = [rank for rank in blocked.behind if rank not in held]
        if free:
            return _not_entered(job, blocked, free)
    if waits and all(one.behind and not one.unknown for one in waits):
        return _different_order(job, waits)
    return next((late for one in waits if one.unknown and (late := _working(job, one))), None)


def all_entered(job: JobObservation) -> Hang | None:
    """Return the hang in a collective that all ranks have entered and none has left."""
    complete = (one for one in blocked_waits(job) if not one.behind and not one.unknown)
    blocked = next(complete, None)
    if blocked is None:
        return None
    ranks = sorted(blocked.entered)
    what = f"{subject(ranks, 'has', 'have all')} entered {blocked.words}, but it does not complete"
    next_text = (
        "Check for network or GPU errors; NCCL_DEBUG=INFO shows more. A kernel launched "
        "earlier may be stuck as well."
    )
    return job.hang(HangCause.ALL_ENTERED, ranks, ranks, what, next_text, "communication", blocked)


def _mismatch(job: JobObservation, blocked: BlockedCollective) -> Hang | None:
    """Return the hang of ranks that call different collectives under one number."""
    forms: dict[tuple[str, int | None], list[int]] = {}
    for rank, one in blocked.entered.items():
        equal = any(part in one.operation for part in EQUAL_SIZES)
        size = one.input_bytes if equal else None
        kind = next((name for name in KINDS if name in one.operation), one.operation)
        forms.setdefault((kind, size), []).append(rank)
    if len(forms) < 2:
        return None
    # The smallest group of ranks is wrong; of equal ones that without the lowest rank.
    sides = sorted(forms.items(), key=lambda side: (-len(side[1]), side[1][0]))
    odd = [rank for _, ranks in sides[1:] for rank in ranks]
    firsts = [(ranks, blocked.entered[ranks[0]]) for _, ranks in sides]
    calls = [
        f"{ranks_text(ranks)} {one.operation}{size_words(one)}" for ranks, one in firsts[:NAMED]
    ]
    calls += [f"{len(firsts) - NAMED} more"] if len(firsts) > NAMED else []
    what = f"the ranks call different collectives as {blocked.number}: {'; '.join(calls)}"
    next_text = "All ranks must call the same operations with the same sizes in the same order. "
    next_text = (next_text + at(job, odd[0])).strip()
    right = sorted(sides[0][1])
    return job.hang(
        HangCause.MISMATCH, sorted(odd), right, what, next_text, "communication", blocked
    )


def _not_entered(job: JobObservation, blocked: BlockedCollective, late: Sequence[int]) -> Hang:
    came, last = sorted(blocked.entered), job.records[late[0]]
    created_s = blocked.first.created_s
    ago_s = max(0.0, job.records[came[0]].seen - created_s)
    ago = "" if job.ended or not created_s else f" {format_duration(ago_s)} ago"
    has = subject(late, "had", "had") if job.ended else subject(late, "has", "have")
    what = f"{has} not entered {blocked.words}, which {ranks_text(came)} entered"
    place, next_text = "", f"py-spy dump --pid {last.pid} shows where rank {late[0]} is."
    if at(job, late[0]):
        place = f". {at(job, late[0]).rstrip('.')}"
        next_text = f"Check what rank {late[0]} {'did' if job.ended else 'does'} there."
    cause, now = HangCause.NOT_ENTERED, what + ago + place
    return job.hang(cause, late, came, what + place, next_text, last.phase, blocked, now=now)


def _different_order(job: JobObservation, chained: Sequence[BlockedCollective]) -> Hang:
    places = [f"{ranks_text(sorted(one.entered))} in {one.words}" for one in chained[:NAMED]]
    ranks = sorted({rank for one in chained for rank in one.entered})
    what = f"ranks wait for each other: {'; '.join(places)}"
    next_text = "All ranks must call the collectives of their groups in the same order."
    return job.hang(HangCause.ORDER, ranks, ranks, what, next_text, "communication", chained[0])


def _working(job: JobObservation, blocked: BlockedCollective) -> Hang | None:
    """Return the hang caused by live ranks without a record; None before PATIENCE_S."""
    unknown = [one for one in job.ranks if one.rank in blocked.unknown]
    busy = [one for one in unknown if one.condition is RankLiveness.ALIVE]
    if len(busy) < len(blocked.unknown) or job.silent_s < PATIENCE_S:
        return None
    if job.ended or any(one.record is not None for one in busy):
        return None  # one has a record, without its collectives
    who, came = [one.rank for one in busy], sorted(blocked.entered)
    what = (
        f"{subject(came, 'waits', 'wait')} in {blocked.words} for {ranks_text(who)}, which "
        f"{'is' if len(who) == 1 else 'are'} busy with something other than a step"
    )
    next_text = "Validation or a checkpoint on one rank blocks the others; run it on all ranks."
    return job.hang(HangCause.NOT_ENTERED, who, came, what, next_text, None, blocked)


def messages(job: JobObservation) -> Hang | None:
    """Return the hang in point-to-point operations.

    Returns None while the other rank may still write its record, which shows if it waits as well.
    """
    waits: dict[int, Collective] = {}
    for rank, record in job.records.items():
        one = next((one for one in record.pending if one.sequence is None), None)
        if one is not None:
            waits[rank] = one
    if not waits:
        return None
    peers = {peer for one in waits.values() if (peer := _peer(job, one)) is not None}
    others = sorted((peers or set(job.records)) - set(waits))
    early = not job.ended and job.silent_s < PATIENCE_S
    if early and any(rank not in job.records for rank in others):
        return None
    what = "; ".join(f"rank {rank} waits in {one.operation}" for rank, one in waits.items())
    ranks = others or sorted(waits)
    place = at(job, ranks[0]) if others else ""
    known = job.records.get(ranks[0])
    phase = "communication" if not others else None if known is None else known.phase
    return job.hang(
        HangCause.NOT_ENTERED if others else HangCause.MISMATCH,
        ranks,
        sorted(waits),
        f"{what}. {place.rstrip('.')}" if place else what,
        "Each send needs a receive on the other rank, in the same order.",
        phase,
    )


def _peer(job: JobObservation, one: Collective) -> int | None:
    """Return the other global rank of an operation such as "recv 0<-1" of group ranks."""
    found = re.search(r"(?:<-|->)(\d+)$", one.operation)
    members = job.members(one.group)
    position = len(members) if found is None else int(found[1])
    return members[position] if position < len(members) else None


def stacks(job: JobObservation) -> Hang | None:
    """Return the hang by the Python stacks alone: some ranks wait in torch.distributed."""
    if len(job.records) < max(2, job.world_size or 0):
        return None  # the cause may be a rank without a record
    waits = sorted(rank for rank, one in job.records.items() if one.phase == "communication")
    elsewhere = sorted(
        rank
        for rank, one in job.records.items()
        if one.frames and one.phase != "communication" and not one.pending
    )
    if waits and elsewhere:
        place = at(job, elsewhere[0])
        what = f"{subject(waits, 'waits', 'wait')} for others ({where(job, waits[0])}). {place}"
        next_text = f"Check what rank {elsewhere[0]} is doing there."
        phase = job.records[elsewhere[0]].phase
        return job.hang(HangCause.STACK, elsewhere, waits, what.rstrip(". "), next_text, phase)
    if waits and len(waits) == len(job.records):
        places = "; ".join(f"rank {rank} {where(job, rank)}" for rank in waits[:NAMED])
        what = f"all ranks wait for each other: {places}"
        next_text = "PyTorch has no record of what they wait for; compare the stacks."
        return job.hang(HangCause.STACK, waits, waits, what, next_text, "communication")
    return None
