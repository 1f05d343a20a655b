"""The file `hang-rankK.json` of a rank without steps, written by `watchdog.py`.

It is untrusted when read: `parse` validates it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from stepscope.distributed.flight_recorder import Collective

BYTES_LIMIT = 2**20  # Maximum size of a file; `watchdog.py` writes 30 KB at most.
TEXT_LIMIT, MAX_ENTRIES = 2000, 2000
REFRESH_S = 5.0  # Interval at which a rank rewrites its file while it hangs.
KEPT = 8  # Number of newest collectives of a group that are kept, in addition to pending ones.
AHEAD_S = 86400.0  # Maximum time by which the clock of a rank's host is ahead.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a Python stack; `own` is True for user code."""

    file: str
    line: int
    function: str
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedCause:
    """The cause of a hang as a sentence, from the files of all ranks."""

    what: str
    rank: int
    phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord:
    """One rank without a step. Times are epoch seconds of its host.

    `number` is the folder rank, `rank` the global rank. `since` is the time of the last work,
    `seen` that of the record, `usual_s` the usual time of a step. `groups` has the ranks of each
    process group by name. `frames` is the Python stack of the training thread with the innermost
    frame first, `phase` its phase, `doing` the name of other work, such as compiling.
    """

    schema: Literal[1] = 1
    number: int
    rank: int
    step: int
    since: float
    seen: float
    usual_s: float | None = None
    host: str = ""
    pid: int = 0
    collectives: tuple[Collective, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    collectives_reason: str | None = None
    frames: tuple[StackFrame, ...] = ()
    phase: str | None = None
    doing: str | None = None
    named: DiagnosedCause | None = None

    @property
    def pending(self) -> tuple[Collective, ...]:
        """The collectives that it has entered and not left, oldest first."""
        return tuple(one for one in self.collectives if not one.done)

    def last(self, group: str) -> int | None:
        """Return the number of the last collective that it has entered in a group, or None."""
        mine = (one.sequence for one in self.collectives if one.group == group)
        return max((sequence for sequence in mine if sequence is not None), default=None)

    @property
    def entered_s(self) -> float:
        """When it entered its newest collective, in epoch seconds; 0 if unknown."""
        return max((one.created_s for one in self.collectives), default=0.0)

    @property
    def place(self) -> StackFrame | None:
        """The innermost frame of user code, or else of any code."""
        own = (frame for frame in self.frames if frame.own)
        return next(own, next(iter(self.frames), None))


def hang_name(number: int) -> str:
    """Return the name of a rank's file in the run folder."""
    return f"hang-rank{number}.json"


def parse(text: str | bytes) -> HangRecord:
    """Return the untrusted content of a file. Raises ValueError if it is invalid."""
    import msgspec  # noqa: PLC0415 - 10 ms, and a rank that does not hang reads no such file

    try:
        record = msgspec.json.decode(text, type=HangRecord)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"record: must be that of a hang: {error}") from None
    lists = (record.collectives, record.frames, record.groups, *record.groups.values())
    if max(map(len, lists)) > MAX_ENTRIES:
        raise ValueError(f"record: must have at most {MAX_ENTRIES} entries in a list")
    named = () if record.named is None else (record.named,)
    for part in (record, *record.collectives, *record.frames, *named):
        for one in fields(part):
            _check(one.name, getattr(part, one.name))
    if record.since > record.seen:
        raise ValueError("record.since: must not be after record.seen")
    return record


def _check(name: str, value: Any) -> None:
    """Raise ValueError for impossible times and counts, and for long texts."""
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        raise ValueError(f"record: {name} must have at most {TEXT_LIMIT} characters")
    if isinstance(value, int) and not 0 <= value < 2**63:
        raise ValueError(f"record: {name} must be a count")
    if isinstance(value, float) and not 0 <= value <= time.time() + AHEAD_S:
        raise ValueError(f"record: {name} must be a time and not in the future, got {value:.6g}")
