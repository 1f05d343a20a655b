"""The file `hang-rankK.json` of a rank without steps, written by `watchdog.py`.

It is untrusted when read: `parse` validates it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from stepscope.distributed.flight_recorder import Collective, Count, Seconds, Text

BYTES_LIMIT = 2**20  # Maximum size of a file; `watchdog.py` writes 30 KB at most.
REFRESH_S = 5.0  # Interval at which a rank rewrites its file while it hangs.
KEPT = 8  # Number of newest collectives of a group that are kept, in addition to pending ones.
AHEAD_S = 86400.0  # Maximum time by which the clock of a rank's host is ahead.
Limit = msgspec.Meta(max_length=2000)  # The diagnosis compares each group with all collectives.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a Python stack; `own` is True for user code."""

    file: Text
    line: Count
    function: Text
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedCause:
    """The cause of a hang as a sentence, from the files of all ranks."""

    what: Text
    rank: Count
    phase: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord:
    """One rank without a step. Times are epoch seconds of its host.

    `number` is the folder rank, `rank` the global rank. `since` is the time of the last work,
    `seen` that of the record, `usual_s` the usual time of a step. `groups` has the ranks of each
    process group by name. `frames` is the Python stack of the training thread with the innermost
    frame first, `phase` its phase, `doing` the name of other work, such as compiling.
    """

    schema: Literal[1] = 1
    number: Count
    rank: Count
    step: Count
    since: Seconds
    seen: Seconds
    usual_s: Seconds | None = None
    host: Text = ""
    pid: Count = 0
    collectives: Annotated[tuple[Collective, ...], Limit] = ()
    groups: Annotated[dict[Text, Annotated[tuple[Count, ...], Limit]], Limit] = field(
        default_factory=dict
    )
    collectives_reason: Text | None = None
    frames: Annotated[tuple[StackFrame, ...], Limit] = ()
    phase: Text | None = None
    doing: Text | None = None
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
    try:
        record = msgspec.json.decode(text, type=HangRecord)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"record: must be that of a hang: {error}") from None
    newest = max(record.seen, record.entered_s)
    if record.since > record.seen or newest > time.time() + AHEAD_S:
        raise ValueError("record: since must not be after seen, and no time in the future")
    return record
