"""Finds the cause of a hang in messages between two ranks and in Python stacks; pure."""

from __future__ import annotations

import re

from stepscope.distributed.hangs.hang_collectives import PATIENCE_S
from stepscope.distributed.hangs.job_state import (
    NAMED,
    Cause,
    Hang,
    Job,
    at,
    names,
    wait_waits,
    where,
)
from stepscope.distributed.hangs.record import Entered


def messages(job: Job) -> Hang | None:
    """Return the hang in messages between two ranks.

    Returns None while a rank that is waited for may still write its record: it tells whether that
    rank waits as well.
    """
    waits: dict[int, Entered] = {}
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
    told = "; ".join(f"rank {rank} waits in {one.operation}" for rank, one in waits.items())
    ranks = others or sorted(waits)
    place = at(job, ranks[0]) if others else ""
    known = job.records.get(ranks[0])
    phase = "communication" if not others else None if known is None else known.phase
    return job.hang(
        Cause.NOT_ENTERED if others else Cause.MISMATCH,
        ranks,
        sorted(waits),
        f"{told}. {place.rstrip('.')}" if place else told,
        "Each send needs a receive on the other rank, in the same order.",
        phase,
    )


def _peer(job: Job, one: Entered) -> int | None:
    """Return the other rank of a message, such as "recv 0<-1"; torch numbers it in its group."""
    found = re.search(r"(?:<-|->)(\d+)$", one.operation)
    members = job.members(one.group)
    position = len(members) if found is None else int(found[1])
    return members[position] if position < len(members) else None


def stacks(job: Job) -> Hang | None:
    """Judge by the Python stacks alone: some wait in torch.distributed, and others do not."""
    if len(job.records) < max(2, job.world_size or 0):
        return None  # one that has no record may be the one
    waits = sorted(rank for rank, one in job.records.items() if one.phase == "communication")
    elsewhere = sorted(
        rank
        for rank, one in job.records.items()
        if one.frames and one.phase != "communication" and not one.pending
    )
    if waits and elsewhere:
        place = at(job, elsewhere[0])
        what = f"{names(waits)} {wait_waits(waits)} for others ({where(job, waits[0])}). {place}"
        next_text = f"Look at what rank {elsewhere[0]} does there."
        phase = job.records[elsewhere[0]].phase
        return job.hang(Cause.STACK, elsewhere, waits, what.rstrip(". "), next_text, phase)
    if waits and len(waits) == len(job.records):
        places = "; ".join(f"rank {rank} {where(job, rank)}" for rank in waits[:NAMED])
        what = f"all ranks wait for each other: {places}"
        next_text = "torch has no record of what they wait for; compare the lines."
        return job.hang(Cause.STACK, waits, waits, what, next_text, "communication")
    return None
