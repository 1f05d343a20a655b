"""The state of a job that hangs, from the records of its ranks, and messages. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.distributed import ranks_text
from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.record import HangRecord


class RankLiveness(StrEnum):
    """Liveness of the process of a rank."""

    ALIVE = "alive"
    STOPPED = "stopped by a signal"
    SILENT = "silent"
    GONE = "gone"
    ENDED = "ended"
    ABSENT = "never started"


class HangCause(StrEnum):
    """Cause of a hang."""

    NOT_ENTERED = "not entered"
    MISMATCH = "mismatch"
    ORDER = "different order"
    GONE = "gone"
    STOPPED = "stopped"
    SILENT = "silent"
    ENDED = "ended"
    ABSENT = "absent"
    ALL_ENTERED = "all entered"
    STACK = "elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """State of one rank of a job by its global `rank`; `record` is that of a present hang."""

    rank: int
    condition: RankLiveness = RankLiveness.ALIVE
    host: str = ""
    pid: int | None = None
    step: int | None = None
    beat_age_s: float | None = None
    paused: bool = False
    reason: str | None = None
    record: HangRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang and its cause. `ranks` are the ranks to check, `waiting` wait for these.

    `phase` is that of the first of `ranks`, None if unknown. `group`, `sequence` and `operation`
    name a collective in which ranks wait. `since` is in epoch seconds. `what` is the cause as a
    sentence, `text` includes the duration.
    """

    cause: HangCause
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since: float
    silent_s: float
    step: int
    what: str
    text: str
    next: str
    phase: str | None = None
    group: str | None = None
    sequence: int | None = None
    operation: str | None = None

    @property
    def rank(self) -> int:
        """The rank to check first."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class BlockedCollective:
    """A collective in which ranks wait: `entered` by at least one rank, not by those `behind`."""

    group: str
    sequence: int
    entered: dict[int, Collective]
    behind: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    @property
    def first(self) -> Collective:
        """The collective of the lowest rank that has entered it."""
        return self.entered[min(self.entered)]

    @property
    def number(self) -> str:
        """The number of the collective, with its group unless that is the default group."""
        of = "" if self.group == "0" else f" of group {self.group}"
        return f"#{self.sequence:,}{of}"

    @property
    def words(self) -> str:
        """The collective with its number and size."""
        return f"{self.first.operation} {self.number}{size_words(self.first)}"


@dataclass(frozen=True, slots=True)
class JobObservation:
    """All ranks at one time; `ended`: the job is over."""

    ranks: tuple[RankObservation, ...]
    now: float
    world_size: int | None
    ended: bool

    @property
    def records(self) -> dict[int, HangRecord]:
        """The records of the ranks without steps."""
        return {one.rank: one.record for one in self.ranks if one.record is not None}

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a group: as recorded, all for the default group, else those seen."""
        for record in self.records.values():
            if record.groups.get(group):
                return record.groups[group]
        if group == "0" and self.world_size is not None:
            return tuple(range(self.world_size))
        seen = (
            rank
            for rank, record in self.records.items()
            if any(one.group == group for one in record.collectives)
        )
        return tuple(sorted(seen))

    @property
    def silent_s(self) -> float:
        """Longest time without a step in seconds, by the clock of that rank."""
        longest = max(record.seen - record.since for record in self.records.values())
        newest = max(record.seen for record in self.records.values())
        return longest if self.ended else longest + max(0.0, self.now - newest)

    def hang(
        self,
        cause: HangCause,
        ranks: Sequence[int],
        waiting: Sequence[int],
        what: str,
        next: str,
        phase: str | None = None,
        blocked: BlockedCollective | None = None,
        *,
        now: str | None = None,
    ) -> Hang:
        """Return a hang; `what` begins a sentence, `next` is one, `now` is `what` at present."""
        step, silent_s = min(record.step for record in self.records.values()), self.silent_s
        begin = "It had made no step for" if self.ended else "No step for"
        silence = f"{begin} {format_duration(silent_s)} (the last was step {step:,})"
        return Hang(
            cause=cause,
            ranks=tuple(ranks),
            waiting=tuple(waiting),
            since=min(record.since for record in self.records.values()),
            silent_s=silent_s,
            step=step,
            what=f"{what[:1].upper()}{what[1:]}.",
            text=f"{silence}: {now or what}.",
            next=next,
            phase=phase,
            group=None if blocked is None else blocked.group,
            sequence=None if blocked is None else blocked.sequence,
            operation=None if blocked is None else blocked.first.operation,
        )


def blocked_waits(job: JobObservation) -> Iterator[BlockedCollective]:
    """Yield the collective in which each group waits, the longest wait first."""
    first: dict[str, int] = {}
    for record in job.records.values():
        for one in record.pending:
            if one.sequence is not None:
                known = first.get(one.group, one.sequence)
                first[one.group] = min(known, one.sequence)
    blocked = [_blocked_in(job, group, sequence) for group, sequence in first.items()]
    waits = [one for one in blocked if one.entered]
    yield from sorted(waits, key=lambda one: min(c.created_s for c in one.entered.values()))


def _blocked_in(job: JobObservation, group: str, sequence: int) -> BlockedCollective:
    entered: dict[int, Collective] = {}
    behind, unknown = [], []
    for rank in job.members(group):
        record = job.records.get(rank)
        if record is None or record.collectives_reason is not None:
            unknown.append(rank)
            continue
        mine = (one for one in record.collectives if (one.group, one.sequence) == (group, sequence))
        one = next(mine, None)
        last = record.last(group)
        if one is not None:
            entered[rank] = one
        elif last is None or last < sequence:
            behind.append(rank)  # else it has left the collective, and dropped its entry
    return BlockedCollective(group, sequence, entered, tuple(behind), tuple(unknown))


def at(job: JobObservation, rank: int) -> str:
    """Return the place of a rank, now or at the end, as a sentence; "" if unknown."""
    record = job.records.get(rank)
    if record is None or record.place is None:
        return ""
    doing = f", {record.doing}" if record.doing else ""
    part = f" ({record.phase}{doing})" if record.phase else f" ({record.doing})" if doing else ""
    return f"Rank {rank} {'was' if job.ended else 'is'} {where(job, rank)}{part}."


def where(job: JobObservation, rank: int) -> str:
    """Return the text of the file and line of a rank."""
    record = job.records[rank]
    frame = record.place
    if frame is None:
        return "at an unknown line"
    name = frame.file.rsplit("/", 1)[-1]
    return f"at {name}:{frame.line} in {frame.function}"


def size_words(entered: Collective) -> str:
    """Return the size of a collective in parentheses."""
    return f" ({format_bytes(entered.input_bytes)})" if entered.input_bytes else ""


def subject(ranks: Sequence[int], one: str, several: str) -> str:
    """Return ranks with the matching verb form, as in "rank 2 waits"."""
    return f"{ranks_text(ranks)} {one if len(ranks) == 1 else several}"
