"""The file `hang-rankK.json` of a rank without steps: its stack and its collectives.

`capture` reads both without blocking the rank. The file is untrusted: `parse` validates it.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from stepscope.common.clock import clock
from stepscope.common.json_values import first_line, to_text
from stepscope.distributed import flight_recorder
from stepscope.distributed.debug_pipe import NcclRecord
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
    group by name. `frames` is the stack of the training thread, innermost first, `doing` work
    outside a step.
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


COMPILING = "compiling"  # `doing` of a record that is slow work and no hang.
DEEPEST = 200  # Maximum number of frames that are read.
MAX_FRAMES = 12  # Number of innermost frames that are kept.
TEXT = 200  # Number of characters that are kept of the end of a file's path.

PHASES = (
    # The launcher's frames enclose a whole training.
    ("torch/distributed/elastic/", None),
    ("torch/distributed/launcher/", None),
    ("torch/distributed/run.py", None),
    ("torch/distributed/", "communication"),
    ("torch/utils/data/", "input"),
    ("torch/autograd/", "backward"),
    ("torch/_tensor.py", "backward"),
    ("torch/optim/", "optimizer"),
    ("torch/nn/modules/", "forward"),
)
"""Phase of the step by the innermost listed file."""
DOING = (
    ("torch/_dynamo/convert_frame.py", COMPILING),
    ("torch/_inductor/compile_fx.py", COMPILING),
    ("torch/serialization.py", "saving or loading a file"),
    ("torch/distributed/checkpoint/", "saving or loading a checkpoint"),
)
"""Work outside of a step, by the innermost listed file."""
_LIBRARIES = tuple(
    f"{path}/"
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(__file__).resolve().parents[2]),
    }
)


def frames_of(thread: int) -> tuple[StackFrame, ...]:
    """Return the stack of a thread by its id, the innermost frame first; () if it has ended."""
    frame = sys._current_frames().get(thread)
    frames: list[StackFrame] = []
    while frame is not None and len(frames) < DEEPEST:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        frames.append(
            StackFrame(file=file, line=frame.f_lineno, function=function, own=_is_own(file))
        )
        frame = frame.f_back
    return tuple(frames)


def kept(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Return the innermost frames, and the innermost frame of user code."""
    inner = frames[:MAX_FRAMES]
    has_own = any(frame.own for frame in inner)
    own = [] if has_own else [frame for frame in frames[MAX_FRAMES:] if frame.own][:1]
    return tuple(
        replace(frame, file=to_text(frame.file)[-TEXT:], function=frame.function[:TEXT])
        for frame in (*inner, *own)
    )


def word_of(frames: Iterable[StackFrame], words: Sequence[tuple[str, str | None]]) -> str | None:
    """Return the word of the innermost frame whose file is listed in `words`, or None."""
    for frame in frames:
        word = next((word for part, word in words if part in frame.file), None)
        if word is not None:
            return word
    return None


def _is_own(file: str) -> bool:
    if file.startswith("<") or "site-packages/" in file or "dist-packages/" in file:
        return False
    return not file.startswith(_LIBRARIES)


PENDING = 64  # Number of oldest pending collectives that are kept.
RANKS_LIMIT = 1024  # Number of ranks of a group that are kept.

_nccl = NcclRecord()


def capture(known: HangRecord, thread: int) -> HangRecord:
    """Return the record with the present state; `thread` is the id of the training thread."""
    frames = frames_of(thread)
    record = replace(
        known,
        seen=clock.now(),
        frames=kept(frames),
        phase=word_of(frames, PHASES),
        doing=word_of(frames, DOING),
    )
    if record.doing == COMPILING:
        # Compiling may capture a CUDA graph, which a query of NCCL's events would end.
        return replace(record, collectives_reason="the training thread compiles")
    try:
        # The recorder of gloo and others has no CUDA events: its dump cannot wait for a driver.
        dump = (
            _nccl.look(record.rank)
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
        collectives=tuple(newest(dump)),
        groups={name: ranks[:RANKS_LIMIT] for name, ranks in groups.items() if ranks},
        collectives_reason=None if dump.collectives else "the Flight Recorder is empty",
    )


def newest(dump: flight_recorder.FlightRecorderDump) -> Sequence[Collective]:
    """Return the oldest pending collectives, and the newest of each group, in order."""
    pending = [one for one in dump.collectives if not one.done][:PENDING]
    chosen = {id(one) for one in pending}
    counts: dict[str, int] = {}
    for one in reversed(dump.collectives):
        if counts.setdefault(one.group, 0) < KEPT:
            counts[one.group] += 1
            chosen.add(id(one))
    return [one for one in dump.collectives if id(one) in chosen]
