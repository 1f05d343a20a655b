"""A job that makes no step, as its ranks have told it, and the words for it; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.distributed import ranks_text
from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.record import HangRecord


class RankLiveness(StrEnum):
    """How the process of a rank is."""

    ALIVE = "alive"
    STOPPED = "stopped by a signal"
    SILENT = "silent"
    GONE = "gone"
    ENDED = "ended"
    ABSENT = "never started"


class HangCause(StrEnum):
    """What a hang comes from."""

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
    """One rank of a job; `rank` is torch's number of it. `beat_age_s` is since its last heartbeat.

    `record` is what it wrote because it makes no step, None where it has written nothing of now.
    """

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
    """A hang and its cause. `ranks` are those to look at, `waiting` those that wait for them.

    `phase` is the part of the step in which the first of `ranks` is: input, forward, backward,
    optimizer or communication; None where it is not known. `group`, `sequence` and `operation`
    name the collective that is waited in, where it is one. `since` is in epoch seconds. `what` is
    the cause as a sentence, `text` says how long it lasts as well.
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
        """The rank to look at first."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class BlockedCollective:
    """The collective that ranks wait in: who has entered it, who has not, of whom it is unknown.

    At least one rank has entered it.
    """

    group: str
    sequence: int
    entered: dict[int, Collective]
    behind: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    @property
    def first(self) -> Collective:
        """The collective as the first rank in it has entered it."""
        return self.entered[min(self.entered)]

    @property
    def number(self) -> str:
        """The number of the collective, with its group but for the first."""
        of = "" if self.group == "0" else f" of group {self.group}"
        return f"#{self.sequence:,}{of}"

    @property
    def words(self) -> str:
        """The collective with its number and size."""
        return f"{self.first.operation} {self.number}{size_words(self.first)}"


@dataclass(frozen=True, slots=True)
class JobObservation:
    """All ranks at one moment; `ended` says that the job is over."""

    ranks: tuple[RankObservation, ...]
    now: float
    world_size: int | None
    ended: bool

    @property
    def records(self) -> dict[int, HangRecord]:
        """The records of the ranks that make no step."""
        return {one.rank: one.record for one in self.ranks if one.record is not None}

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a group: as told, all for the first one, else those seen in it."""
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
        """How long the rank that has waited longest has made no step, by its own clock."""
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
        told: str | None = None,
    ) -> Hang:
        """Return a hang in words: `what` completes a sentence, `next` is one.

        `told` is `what` with what is so only at this moment, such as ages.
        """
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
            text=f"{silence}: {told or what}.",
            next=next,
            phase=phase,
            group=None if blocked is None else blocked.group,
            sequence=None if blocked is None else blocked.sequence,
            operation=None if blocked is None else blocked.first.operation,
        )


def blocked_waits(job: JobObservation) -> Iterator[BlockedCollective]:
    """Yield the collective that each group waits in, that of the longest wait first."""
    first: dict[str, int] = {}
    for record in job.records.values():
        for one in record.pending:
            if one.sequence is not None:
                known = first.get(one.group, one.sequence)
                first[one.group] = min(known, one.sequence)
    found = [_blocked_in(job, group, sequence) for group, sequence in first.items()]
    waits = [blocked for blocked in found if blocked.entered]
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
            behind.append(rank)  # else it is past it, and its record has forgotten it
    return BlockedCollective(group, sequence, entered, tuple(behind), tuple(unknown))


def at(job: JobObservation, rank: int) -> str:
    """Return where a rank is, or was at the end, as a sentence; "" where it is not known."""
    record = job.records.get(rank)
    if record is None or record.place is None:
        return ""
    doing = f", {record.doing}" if record.doing else ""
    part = f" ({record.phase}{doing})" if record.phase else f" ({record.doing})" if doing else ""
    return f"Rank {rank} {'was' if job.ended else 'is'} {where(job, rank)}{part}."


def where(job: JobObservation, rank: int) -> str:
    """Return the file and line of a rank."""
    record = job.records[rank]
    frame = record.place
    if frame is None:
        return "at an unknown line"
    name = frame.file.rsplit("/", 1)[-1]
    return f"at {name}:{frame.line} in {frame.function}"


def size_words(entered: Collective) -> str:
    """Return its size in parentheses."""
    return f" ({format_bytes(entered.input_bytes)})" if entered.input_bytes else ""


def subject(ranks: Sequence[int], one: str, several: str) -> str:
    """Return ranks with the form of a verb for them, as in "rank 2 waits"."""
    return f"{ranks_text(ranks)} {one if len(ranks) == 1 else several}"
