"""Find the cause of a hang from the records of a job's ranks.

A rank that hangs waits in an operation that other ranks have not entered: a collective, a message,
or what its stack shows within torch.distributed. The cause is a rank that others wait for and that
does not wait itself. If a necessary record is missing, no rank is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.common.stack_phases import COMMUNICATION
from stepscope.distributed import NAMED, ranks_text
from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.record import COMPILING, HangRecord, age_s, read_record
from stepscope.run import STALE_S, RunInfo, RunStatus
from stepscope.run.rank_status import JobRank, RankStatus, ranks_of

PATIENCE_S = 60.0  # Time for which a rank may do other work, such as a validation.
EQUAL_SIZES = ("all_reduce", "reduce_scatter", "broadcast", "all_gather_base", "into_tensor")
"""Parts of the names of operations whose tensors have the same size on all ranks."""


class HangCause(StrEnum):
    """Cause of a hang; from GONE on it is the state of a process."""

    NOT_ENTERED = "not entered"
    MISMATCH = "mismatch"
    ORDER = "different order"
    ALL_ENTERED = "all entered"
    GONE = "gone"
    SILENT = "silent"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """State of one rank of a job by its global `rank`; `record` is that of a present hang.

    `lost` is the state of its process, None if that is alive, and `process` names it in a sentence.
    `ended_at` is the time of an orderly end in epoch seconds.
    """

    rank: int
    lost: HangCause | None = None
    process: str = ""
    step: int = 0
    record: HangRecord | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang and its cause. `ranks` are the ranks to check, `waiting` wait for these.

    `phase` is that of the first of `ranks`, None if unknown. `operation` is that in which the first
    of `waiting` waits. `since` is in epoch seconds. `what` is the cause as a sentence, `text`
    includes the duration.
    """

    cause: HangCause
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since: float
    what: str
    text: str
    next: str
    phase: str | None
    operation: str | None

    @property
    def rank(self) -> int:
        """The rank to check first."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation in which a rank waits.

    It needs the ranks `behind`, whose records lack it, and those `unknown`, without such a record.
    """

    text: str
    behind: Sequence[int]
    unknown: Sequence[int]
    call: Collective | None = None


Evidence = tuple[Sequence[int], Sequence[int]]
"""The ranks of a cause, and the ranks that wait for them; neither is empty."""


@dataclass(frozen=True)
class JobObservation:
    """All ranks by global rank at one time; `ended`: the job is over."""

    ranks: dict[int, RankObservation]
    world_size: int
    ended: bool

    @cached_property
    def records(self) -> dict[int, HangRecord]:
        """The records of the ranks without steps."""
        return {rank: one.record for rank, one in self.ranks.items() if one.record is not None}

    @cached_property
    def silent_s(self) -> float:
        """Longest time without a step in seconds, by the clock of that rank."""
        return max(record.seen - record.since for record in self.records.values())

    @cached_property
    def busy(self) -> dict[int, RankObservation]:
        """The live ranks without a record."""
        return {rank: one for rank, one in self.ranks.items() if not one.record and not one.lost}

    @cached_property
    def waits(self) -> dict[int, Wait]:
        """The oldest operation in which each rank waits, if it waits."""
        waits = {}
        for rank, record in self.records.items():
            if record.pending:
                waits[rank] = self._wait_in(rank, record.pending[0])
            elif record.phase == COMMUNICATION and record.doing is None:
                # gloo does not record messages. The cause may be any rank without a record.
                others = [one for one in self.ranks if one != rank]
                is_known = len(self.records) >= self.world_size
                behind, unknown = (others, []) if is_known else ([], others)
                waits[rank] = Wait(f"torch.distributed at {record.place}", behind, unknown)
        return waits

    def _wait_in(self, own: int, call: Collective) -> Wait:
        members = self._members(call.group)
        known = set(self.records)
        if call.sequence is None:  # such as "recv 0<-1", whose numbers are of the group
            needed = [rank for rank in members if rank != own]
        else:
            known -= {rank for rank, record in self.records.items() if record.collectives_reason}
            needed = [
                rank
                for rank in members
                if rank not in known or self.records[rank].last(call.group) < call.sequence
            ]
        behind = [rank for rank in needed if rank in known]
        return Wait(_call_text(call), behind, [rank for rank in needed if rank not in known], call)

    def _members(self, group: str) -> Sequence[int]:
        """Return the ranks of a group: as recorded, else those seen."""
        for record in self.records.values():
            if record.groups.get(group):
                return record.groups[group]
        return [rank for rank, record in self.records.items() if record.last(group) >= 0]


def _lost(cause: HangCause, job: JobObservation) -> Evidence | None:
    """Return the ranks whose process is in this state; after a job all have exited."""
    lost = [
        rank
        for rank, one in job.ranks.items()
        if one.lost is cause and not (job.ended and one.record)
    ]
    waiting = [rank for rank in job.records if rank not in lost]
    return (lost, waiting) if lost and waiting else None


def _ended(job: JobObservation) -> Evidence | None:
    """Return the ranks that have ended, if others wait for them."""
    ended = [rank for rank, one in job.ranks.items() if one.lost is HangCause.ENDED]
    for rank, wait in job.waits.items():
        needed = [one for one in ended if one in wait.unknown and one not in job.records]
        if job.ended:  # a rank that ended later was ended by the hang, or by its time-out
            seen = job.records[rank].seen
            needed = [one for one in needed if (job.ranks[one].ended_at or seen) < seen]
        if needed:
            return needed, [rank]
    return None


def _mismatch(job: JobObservation) -> Evidence | None:
    """Return the ranks that call another collective than most under one number."""
    forms: dict[tuple[str, int], dict[tuple[str, int | None], list[int]]] = {}
    for rank, wait in job.waits.items():
        call = wait.call
        if call is not None and call.sequence is not None:
            is_equal = any(part in call.operation for part in EQUAL_SIZES)
            form = call.operation, call.input_bytes if is_equal else None
            forms.setdefault((call.group, call.sequence), {}).setdefault(form, []).append(rank)
    for ranks_by_form in forms.values():
        if len(ranks_by_form) > 1:
            # Of equal groups of ranks that without the lowest rank is named.
            usual, *others = sorted(ranks_by_form.values(), key=lambda one: (-len(one), one[0]))
            return sorted(rank for ranks in others for rank in ranks), usual
    return None


def _not_entered(job: JobObservation) -> Evidence | None:
    """Return the ranks that others wait for and that do not wait themselves."""
    free = {rank for wait in job.waits.values() for rank in wait.behind} - job.waits.keys()
    waiting = [rank for rank, wait in job.waits.items() if not free.isdisjoint(wait.behind)]
    return (sorted(free), waiting) if free else None


def _circle(job: JobObservation) -> Evidence | None:
    """Return the ranks that wait for each other in different operations."""
    if not job.waits or any(wait.unknown or not wait.behind for wait in job.waits.values()):
        return None
    return list(job.waits), list(job.waits)


def _without_record(job: JobObservation) -> Evidence | None:
    """Return the live ranks without a record that others have waited for since PATIENCE_S."""
    for rank, wait in job.waits.items():
        is_late = job.ended or job.silent_s >= PATIENCE_S
        if is_late and wait.unknown and job.busy.keys() >= set(wait.unknown):
            return wait.unknown, [rank]
    return None


def _all_entered(job: JobObservation) -> Evidence | None:
    ranks = [rank for rank, wait in job.waits.items() if not wait.behind and not wait.unknown]
    return (ranks, ranks) if ranks else None


@dataclass(frozen=True, slots=True)
class HangCase:
    """A cause, its evidence, and a sentence and a recommendation with the fields of `find_hang`."""

    cause: HangCause
    find: Callable[[JobObservation], Evidence | None]
    what: str
    next: str


HANG_CASES = (
    HangCase(
        HangCause.GONE,
        partial(_lost, HangCause.GONE),
        "{ranks} left no exit record ({process}){waits}",
        "Check the host's log, such as dmesg, for the reason.",
    ),
    HangCase(
        HangCause.SILENT,
        partial(_lost, HangCause.SILENT),
        "{ranks} ({process}) did not respond: a signal stopped it, a call holds the GIL, or the "
        "host hangs{waits}",
        "Run py-spy dump --pid on that host to see where it is; kill -CONT resumes a stopped one.",
    ),
    HangCase(
        HangCause.ENDED,
        _ended,
        "{ranks} ended ({process}){waits}",
        "All ranks must run the same number of steps.",
    ),
    HangCase(
        HangCause.MISMATCH,
        _mismatch,
        "the ranks call different collectives{waits}",
        "All ranks must call the same operations with the same sizes in the same order{place}.",
    ),
    HangCase(
        HangCause.NOT_ENTERED,
        _not_entered,
        "{ranks} did not enter {operation}, which {waiting} entered{place}",
        "Check what keeps {ranks} there; py-spy dump shows the stack ({process}).",
    ),
    HangCase(
        HangCause.ORDER,
        _circle,
        "ranks wait for each other{waits}",
        "All ranks must call the same operations in the same order. Each send needs a receive.",
    ),
    HangCase(
        HangCause.NOT_ENTERED,
        _without_record,
        "{ranks} did not enter {operation}, which {waiting} entered, and works on something other "
        "than a step",
        "Validation or a checkpoint on one rank blocks the others; run it on all ranks.",
    ),
    HangCase(
        HangCause.ALL_ENTERED,
        _all_entered,
        "{ranks} entered {operation}, but it does not complete",
        "Check for network or GPU errors; NCCL_DEBUG=INFO shows more. A kernel launched earlier "
        "may be stuck as well.",
    ),
)
"""The first case with evidence is the cause."""


def find_hang(
    ranks: Sequence[RankObservation], world_size: int, *, ended: bool = False
) -> Hang | None:
    """Return the present hang of a job, or its last one (`ended`).

    Returns None if the job makes steps, or the cause is unknown.
    """
    by_rank = {one.rank: one for one in sorted(ranks, key=lambda one: one.rank)}
    job = JobObservation(by_rank, world_size, ended)
    if not job.records or any(one.doing == COMPILING for one in job.records.values()):
        return None
    # A live rank without a record may be ahead of the others, as within `Join`.
    last_step = max(record.step for record in job.records.values())
    if not ended and any(one.step > last_step for one in job.busy.values()):
        return None
    for case in HANG_CASES:
        evidence = case.find(job)
        if evidence is not None:
            return _hang(job, case, evidence)
    return None


def _hang(job: JobObservation, case: HangCase, evidence: Evidence) -> Hang:
    ranks, waiting = evidence
    record = job.records.get(ranks[0])
    place = ""
    if record is not None and record.place:
        work = ", ".join(text for text in (record.phase, record.doing) if text)
        place = f". Rank {ranks[0]}: {record.place}" + (f" ({work})" if work else "")
    ranks_in: dict[str, list[int]] = {}
    for rank, wait in job.waits.items():
        ranks_in.setdefault(wait.text, []).append(rank)
    waits = [f"; in {text}: {ranks_text(found)}" for text, found in ranks_in.items()]
    operation = job.waits[waiting[0]].text if waiting[0] in job.waits else None
    fields = {
        "ranks": ranks_text(ranks),
        "waiting": ranks_text(waiting),
        "operation": operation,
        "waits": "".join(waits[:NAMED]),
        "place": place,
        "process": job.ranks[ranks[0]].process if ranks[0] in job.ranks else "unknown process",
    }
    what = case.what.format_map(fields)
    phase = None if record is None else record.phase
    step = min(one.step for one in job.records.values())
    begin = "It had made no step for" if job.ended else "No step for"
    return Hang(
        cause=case.cause,
        ranks=tuple(ranks),
        waiting=tuple(waiting),
        since=min(one.since for one in job.records.values()),
        what=f"{what[:1].upper()}{what[1:]}.",
        text=f"{begin} {format_duration(job.silent_s)} (the last was step {step:,}): {what}.",
        next=case.next.format_map(fields),
        phase=COMMUNICATION if ranks[0] in job.waits else phase,
        operation=operation,
    )


def _call_text(call: Collective) -> str:
    """Return an operation with its number, its group unless that is the default, and its size."""
    number = "" if call.sequence is None else f" #{call.sequence:,}"
    group = "" if call.group == "0" else f" of group {call.group}"
    size = f" ({format_bytes(call.input_bytes)})" if call.input_bytes else ""
    return f"{call.operation}{number}{group}{size}"


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
