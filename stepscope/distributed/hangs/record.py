"""The file `hang-rankK.json` of a rank that makes no step.

`watchdog.py` writes it. The folder may come from others: `parse` refuses other content.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from stepscope.distributed.flight_recorder import Collective

BYTES_LIMIT = 2**20  # Size up to which a file is read; ours have some 30 KB at most.
TEXT_LIMIT, MAX_ENTRIES = 2000, 2000
REFRESH_S = 5.0  # How often a rank writes its file anew while it hangs.
KEPT = 8  # Newest collectives of a group that are kept, besides those that are not over.
AHEAD_S = 86400.0  # By how much the clock of a rank's host may be ahead.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a Python stack; `own` is false for torch's, Stepscope's and other libraries'."""

    file: str
    line: int
    function: str
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedCause:
    """The cause of a hang, found from the files of all ranks, as a sentence."""

    what: str
    rank: int
    phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord:
    """One rank without a step. Times are epoch seconds of its host.

    `number` is the rank's number in the folder, `rank` torch's. `since` is when it was last known
    to work, `seen` when this was written, `usual_s` the usual time of a step. `groups` has the
    ranks of each process group by name. `frames` is the Python stack of the training thread with
    the innermost frame first, `phase` its part of the step, `doing` a word for other work, such as
    compiling or saving.
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
        """What it has entered and not left, oldest first."""
        return tuple(one for one in self.collectives if not one.done)

    def last(self, group: str) -> int | None:
        """Return the number of the last collective of a group that it has entered."""
        mine = (one.sequence for one in self.collectives if one.group == group)
        return max((sequence for sequence in mine if sequence is not None), default=None)

    @property
    def entered_s(self) -> float:
        """When it entered its newest collective, in epoch seconds; 0 where none is known."""
        return max((one.created_s for one in self.collectives), default=0.0)

    @property
    def place(self) -> StackFrame | None:
        """The innermost frame of the user's own code; of any code where there is none."""
        own = (frame for frame in self.frames if frame.own)
        return next(own, next(iter(self.frames), None))


def hang_name(number: int) -> str:
    """Return the name of a rank's file in the run folder."""
    return f"hang-rank{number}.json"


def parse(text: str | bytes) -> HangRecord:
    """Return the content of a file. Raises ValueError for any other content."""
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
    """Raise ValueError for times and counts that no rank can have written."""
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        raise ValueError(f"record: {name} must have at most {TEXT_LIMIT} characters")
    if isinstance(value, int) and not 0 <= value < 2**63:
        raise ValueError(f"record: {name} must be a count")
    if isinstance(value, float) and not 0 <= value <= time.time() + AHEAD_S:
        raise ValueError(f"record: {name} must be a time and not in the future, got {value:.6g}")
