"""What a rank knows while it makes no step, and its form in the run folder: `hang-rankK.json`.

Written by `watchdog.py`. The folder may come from others: what has another form than ours is
refused, with the field that is wrong.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from stepscope.common.json_values import parsed

SCHEMA = 1
BYTES_LIMIT = 2**20
"""Size up to which a file is read; ours have some 20 KB at most."""
REFRESH_S = 5.0
"""How often a rank writes its file anew while it hangs."""
KEPT = 8
"""Newest collectives of a group that are kept, besides those that are not over."""

AHEAD_S = 86400.0
"""By how much the clock of a rank's host may be ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredCollective:
    """A collective, or a message between two ranks, that this rank has entered.

    `sequence` counts the collectives of a group, None for a message. `created_s` is when, in epoch
    seconds of the rank's own host, 0 where it is not known. `state` is torch's word.
    """

    group: str
    operation: str
    sequence: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    input_bytes: int = 0
    created_s: float = 0.0
    state: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a Python stack; `own` is false for torch's, Stepscope's and other libraries'."""

    file: str
    line: int
    function: str
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedCause:
    """The cause of a hang as this rank could name it from the files of all; `what` says it."""

    what: str
    rank: int
    phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord:
    """One rank without a step. Times are epoch seconds of its host.

    `number` is the rank's number in the folder, `rank` torch's. `since` is when it was last known
    to work, `seen` when this was written, `usual_s` the usual time of a step. `groups` has the
    ranks of each process group by name. `frames` is the Python stack of the training thread with
    the innermost frame first, `phase` what it says of the step, `doing` a word for what is no
    step: compiling, or saving.
    """

    number: int
    rank: int
    step: int
    since: float
    seen: float
    usual_s: float | None = None
    host: str = ""
    pid: int = 0
    collectives: tuple[EnteredCollective, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    collectives_reason: str | None = None
    frames: tuple[StackFrame, ...] = ()
    phase: str | None = None
    doing: str | None = None
    named: DiagnosedCause | None = None

    @property
    def pending(self) -> tuple[EnteredCollective, ...]:
        """What it has entered and not left, oldest first."""
        return tuple(one for one in self.collectives if not one.done)

    def last(self, group: str) -> int | None:
        """Return the number of the last collective of a group that it has entered."""
        numbers = [
            one.sequence
            for one in self.collectives
            if one.group == group and one.sequence is not None
        ]
        return max(numbers, default=None)

    @property
    def entered_s(self) -> float:
        """When it entered its newest collective, in epoch seconds; 0 where none is known."""
        return max((one.created_s for one in self.collectives), default=0.0)

    @property
    def place(self) -> StackFrame | None:
        """The innermost frame of the user's own code; of any code where there is none."""
        own = (frame for frame in self.frames if frame.own)
        return next(own, next(iter(self.frames), None))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file; `parse` is the inverse."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def hang_name(number: int) -> str:
    """Return the name of a rank's file in the run folder."""
    return f"hang-rank{number}.json"


def parse(text: str | bytes) -> HangRecord:
    """Return what a file says. Raises ValueError for what is no record of ours."""
    record: HangRecord = parsed(HangRecord, text, SCHEMA, "record")
    _check(record)
    return record


def _check(record: HangRecord) -> None:
    """Raise ValueError for times and counts that no rank can have written."""
    latest = time.time() + AHEAD_S
    if not 0 <= record.since <= record.seen <= latest:
        raise ValueError(
            "record.since, record.seen: must be epoch seconds, one after the other and not in the "
            f"future, got {record.since:.6g} and {record.seen:.6g}"
        )
    for one in record.collectives:
        counts = (one.sequence or 0, one.input_bytes, *(n for size in one.sizes for n in size))
        if min(counts) < 0:
            raise ValueError(f"record.collectives: must have no count below 0, got {min(counts)}")
        if not 0 <= one.created_s <= latest:
            raise ValueError(
                "record.collectives.created_s: must be epoch seconds and not in the future, got "
                f"{one.created_s:.6g}"
            )
