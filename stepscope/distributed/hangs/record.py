"""The file `hang-rankK.json` of a rank without steps: its stack and its collectives.

`capture` reads both without blocking the rank. The file is untrusted: `read_record` validates it.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from stepscope.common.clock import clock
from stepscope.common.files import modified_ns, read_regular_file
from stepscope.common.json_values import first_line, to_text
from stepscope.common.stack_phases import stack_phase
from stepscope.distributed import flight_recorder
from stepscope.distributed.flight_recorder import Collective, Count, NcclRecord, Seconds, Text

MAX_BYTES = 2**20  # Maximum size of a file; `watchdog.py` writes 30 KB at most.
Limit = msgspec.Meta(max_length=2000)  # The diagnosis compares each group with all collectives.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a Python stack; `own` is True for user code."""

    file: Text
    line: Count
    function: Text
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord:
    """One rank without a step. Times are epoch seconds of its host.

    `number` is the folder rank, `rank` the global rank. `since` is the time of the last work,
    `seen` that of the record. `groups` has the ranks of each group by name. `frames` is the stack
    of the training thread, innermost first, `doing` work outside a step.
    """

    schema: Literal[1] = 1
    number: Count
    rank: Count
    step: Count
    since: Seconds
    seen: Seconds
    collectives: Annotated[tuple[Collective, ...], Limit] = ()
    groups: Annotated[dict[Text, Annotated[tuple[Count, ...], Limit]], Limit] = field(
        default_factory=dict
    )
    collectives_reason: Text | None = None
    frames: Annotated[tuple[StackFrame, ...], Limit] = ()
    phase: Text | None = None
    doing: Text | None = None

    @property
    def pending(self) -> tuple[Collective, ...]:
        """The collectives that it has entered and not left, oldest first."""
        return tuple(one for one in self.collectives if not one.done)

    def last(self, group: str) -> int:
        """Return the number of the last collective that it has entered in a group, or -1."""
        mine = (one.sequence for one in self.collectives if one.group == group)
        return max((sequence for sequence in mine if sequence is not None), default=-1)

    @property
    def entered_s(self) -> float:
        """When it entered its newest collective, in epoch seconds; 0 if unknown."""
        return max((one.created_s for one in self.collectives), default=0.0)

    @property
    def place(self) -> str | None:
        """The file and line of the innermost frame of user code, or else of any code."""
        own = [frame for frame in self.frames if frame.own]
        for frame in own or self.frames:
            return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"
        return None


def hang_name(number: int) -> str:
    """Return the name of a rank's file in the run folder."""
    return f"hang-rank{number}.json"


def age_s(folder: Path, number: int) -> float:
    """Return the seconds since a rank wrote its file; since 1970 without a file."""
    written_ns = modified_ns(folder / hang_name(number))
    return time.time() - written_ns / 1e9


def read_record(folder: Path, number: int) -> HangRecord | None:
    """Return the untrusted record of a rank; None if it is missing or invalid."""
    try:
        data = read_regular_file(folder / hang_name(number), MAX_BYTES)
        return msgspec.json.decode(data, type=HangRecord)
    except (OSError, ValueError, RecursionError):
        return None


COMPILING = "compiling"  # `doing` of a record that is slow work and no hang.
DOING = {
    "torch/_dynamo/convert_frame.py": COMPILING,
    "torch/_inductor/compile_fx.py": COMPILING,
    "torch/serialization.py": "saving or loading a file",
    "torch/distributed/checkpoint/": "saving or loading a checkpoint",
}
"""Work outside of a step, by a part of the file of a frame."""
MAX_FRAMES = 100  # Number of innermost frames that are read.
MAX_TEXT = 200  # Number of characters that are kept of the end of a file's path.
KEPT = 256  # Number of newest collectives that are kept.
MAX_RANKS = 1024  # Number of ranks of a group that are kept.
_LIBRARIES = (
    "<",
    f"{sysconfig.get_path('stdlib')}/",
    f"{sysconfig.get_path('platstdlib')}/",
    f"{Path(__file__).resolve().parents[2]}/",
)

_nccl = NcclRecord()


def capture(known: HangRecord, thread: int) -> HangRecord:
    """Return the record with the present state; `thread` is the id of the training thread."""
    frames = frames_of(thread)
    doing = (word for frame in frames for part, word in DOING.items() if part in frame.file)
    record = replace(
        known,
        seen=clock.now(),
        frames=tuple(frames),
        phase=stack_phase((frame.file, frame.function) for frame in frames),
        doing=next(doing, None),
    )
    if record.doing == COMPILING:
        # Compiling may capture a CUDA graph, which a query of NCCL's events would end.
        return replace(record, collectives_reason="the training thread compiles")
    try:
        # The recorder of gloo and others has no CUDA events: its dump cannot wait for a driver.
        dump = (
            _nccl.read(record.rank)
            if flight_recorder.uses_nccl()
            else flight_recorder.dump() or "torch has no Flight Recorder here"
        )
    except Exception as error:  # noqa: BLE001 - a private function of torch may raise anything
        dump = f"the Flight Recorder failed ({first_line(error)})"
    if isinstance(dump, str):
        return replace(record, collectives=(), collectives_reason=dump)
    groups = {**dump.groups, **flight_recorder.groups()}
    return replace(
        record,
        collectives=dump.collectives[-KEPT:],
        groups={name: ranks[:MAX_RANKS] for name, ranks in groups.items() if ranks},
        collectives_reason=None if dump.collectives else "the Flight Recorder is empty",
    )


def frames_of(thread: int) -> list[StackFrame]:
    """Return the stack of a thread by its id, the innermost frame first; [] if it has ended."""
    frame = sys._current_frames().get(thread)
    frames: list[StackFrame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        file = frame.f_code.co_filename
        is_library = file.startswith(_LIBRARIES) or "-packages/" in file
        frames.append(
            StackFrame(
                file=to_text(file)[-MAX_TEXT:],
                line=frame.f_lineno,
                function=frame.f_code.co_name[:MAX_TEXT],
                own=not is_library,
            )
        )
        frame = frame.f_back
    return frames
