"""What messages between two ranks, NCCL's RAS and Python stacks tell of a hang; pure."""

from __future__ import annotations

import re

from stepscope.diagnosis.hang_collectives import PATIENCE_S
from stepscope.diagnosis.hang_job import (
    NAMED,
    Cause,
    Condition,
    Hang,
    Job,
    at,
    names,
    wait_waits,
    where,
)
from stepscope.diagnosis.hang_record import Entered
from stepscope.diagnosis.ras import RasCommunicator, RasRank, behind


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


def ras(job: Job) -> Hang | None:
    """Judge by what NCCL's RAS has answered, where torch has no record of the collectives."""
    if any(record.pending for record in job.records.values()):
        return None  # torch's own record knows more, and could not tell
    missing, late = _by_ras(job)
    # RAS misses a rank that has ended also where nobody waits for it.
    missing = {rank: text for rank, text in missing.items() if not _has_ended(job, rank)}
    ranks = sorted(missing) or sorted(late)
    waiting = sorted(set(job.records) - set(ranks))
    if not ranks or not waiting:
        return None
    told = "; ".join((missing or late)[rank] for rank in ranks[:NAMED])
    place = at(job, ranks[0])
    record = job.records.get(ranks[0])
    return job.hang(
        Cause.SILENT if missing else Cause.NOT_ENTERED,
        ranks,
        waiting,
        f"NCCL RAS: {told}. {place}".rstrip(". "),
        f"Look at what rank {ranks[0]} does.",
        None if record is None else record.phase,
    )


def ras_evidence(job: Job) -> tuple[str, ...]:
    """Return what NCCL's RAS says, in sentences."""
    missing, late = _by_ras(job)
    return tuple(f"NCCL RAS: {text}." for text in [*missing.values(), *late.values()][:NAMED])


def _has_ended(job: Job, rank: int) -> bool:
    known = job.of(rank)
    return known is not None and known.condition is Condition.ENDED and not job.ended


def _by_ras(job: Job) -> tuple[dict[int, str], dict[int, str]]:
    """Return the ranks that RAS misses and those with fewer collectives, each with its words."""
    report = next((one.ras for one in job.records.values() if one.ras is not None), None)
    missing: dict[int, str] = {}
    late: dict[int, str] = {}
    for one in report.communicators if report is not None else ():
        for found in one.ranks:
            rank = _torch_rank(job, one, found)
            if found.missing and rank is not None:
                how = "is considered dead" if found.dead else "does not answer"
                missing[rank] = f"rank {rank} {how}"
    for one, found, kind, most in behind(report) if report is not None else ():
        rank = _torch_rank(job, one, found)
        if rank is not None:
            late[rank] = f"rank {rank} has launched {found.counts[kind]:,} {kind}, others {most:,}"
    return missing, late


def _torch_rank(job: Job, communicator: RasCommunicator, found: RasRank) -> int | None:
    """Return torch's number of a rank: RAS counts those of each communicator from 0."""
    same = [one.rank for one in job.ranks if found.pid is not None and one.pid == found.pid]
    if len(same) == 1:
        return same[0]
    whole = communicator.size is not None and communicator.size == job.world_size
    return found.rank if whole and found.rank >= 0 else None


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
