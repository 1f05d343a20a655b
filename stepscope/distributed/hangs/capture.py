"""Read the stack and the collectives of a rank that makes no step, without blocking it."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.common.clock import clock
from stepscope.common.json_values import first_line, to_text
from stepscope.distributed import flight_recorder
from stepscope.distributed.debug_pipe import NcclRecord
from stepscope.distributed.flight_recorder import Collective, FlightRecorderDump
from stepscope.distributed.hangs.diagnose import COMPILING
from stepscope.distributed.hangs.job_state import BlockedCollective
from stepscope.distributed.hangs.record import KEPT, HangRecord, StackFrame

DEEPEST = 200  # Frames that are looked at.
MAX_FRAMES = 12  # Frames that are kept, the innermost ones.
TEXT = 200  # Characters of a file's path that are kept: its end.

PHASES = (
    # The launcher's own frames lie around a whole training.
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
"""The part of the step by the innermost file that is listed."""
DOING = (
    ("torch/_dynamo/convert_frame.py", COMPILING),
    ("torch/_inductor/compile_fx.py", COMPILING),
    ("torch/serialization.py", "saving or loading a file"),
    ("torch/distributed/checkpoint/", "saving or loading a checkpoint"),
)
"""Work that is no part of a step."""
_LIBRARIES = tuple(
    f"{path}/"
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(__file__).resolve().parents[2]),
    }
)


def frames_of(thread: int) -> tuple[StackFrame, ...]:
    """Return the stack of a thread by its number, the innermost frame first; () where it ended."""
    frame = sys._current_frames().get(thread)
    found: list[StackFrame] = []
    while frame is not None and len(found) < DEEPEST:
        file = frame.f_code.co_filename
        found.append(
            StackFrame(
                file=file, line=frame.f_lineno, function=frame.f_code.co_name, own=_is_own(file)
            )
        )
        frame = frame.f_back
    return tuple(found)


def kept(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Return the frames to keep: the innermost, and the innermost of the user's own code."""
    inner = frames[:MAX_FRAMES]
    has_own = any(frame.own for frame in inner)
    own = [] if has_own else [frame for frame in frames[MAX_FRAMES:] if frame.own][:1]
    return tuple(
        replace(frame, file=to_text(frame.file)[-TEXT:], function=frame.function[:TEXT])
        for frame in (*inner, *own)
    )


def word_of(frames: Iterable[StackFrame], words: Sequence[tuple[str, str | None]]) -> str | None:
    """Return the word of the innermost frame whose file has one in PHASES or DOING."""
    for frame in frames:
        word = next((word for part, word in words if part in frame.file), None)
        if word is not None:
            return word
    return None


def _is_own(file: str) -> bool:
    if file.startswith("<") or "site-packages/" in file or "dist-packages/" in file:
        return False
    return not file.startswith(_LIBRARIES)


PENDING = 64  # Collectives that are kept although they are not over: the oldest ones.
RANKS_LIMIT = 1024  # Ranks that are kept of a group.

_nccl = NcclRecord()


def capture(known: HangRecord, thread: int) -> HangRecord:
    """Return the record with what is so now; `thread` is the number of the training thread."""
    frames = frames_of(thread)
    record = replace(
        known,
        seen=clock.now(),
        frames=kept(frames),
        phase=word_of(frames, PHASES),
        doing=word_of(frames, DOING),
    )
    if record.doing == COMPILING:
        # Compiling may capture a CUDA graph, which a look at NCCL's events would end.
        return replace(record, collectives_reason="the training thread compiles")
    try:
        told = _recorded(record.rank)
    except Exception as error:  # noqa: BLE001 - a private function of torch may raise anything
        told = f"the Flight Recorder failed ({first_line(error)})"
    if isinstance(told, str):
        return replace(record, collectives=(), collectives_reason=told)
    groups = {**told.groups, **flight_recorder.groups()}
    return replace(
        record,
        collectives=tuple(newest(told)),
        groups={name: ranks[:RANKS_LIMIT] for name, ranks in groups.items() if ranks},
        collectives_reason=None if told.collectives else "the Flight Recorder is empty",
    )


def _recorded(rank: int) -> FlightRecorderDump | str:
    """Return the collectives of this process without a call of CUDA, or why there are none.

    The recorder of gloo and others holds no CUDA events: its dump cannot wait for a driver.
    """
    if flight_recorder.uses_nccl():
        return _nccl.look(rank)
    return flight_recorder.dump() or "torch has no Flight Recorder here"


def failed_in(rank: int) -> str | None:
    """Return the collective that fails now for want of another rank, in words; None if unknown.

    The oldest that is not over, else the newest: gloo ends a collective that fails.
    """
    try:
        told = _recorded(rank)
    except Exception:  # noqa: BLE001 - as above
        return None
    if isinstance(told, str) or not told.collectives:
        return None
    one = next((one for one in told.collectives if not one.done), told.collectives[-1])
    if one.sequence is None:
        return one.operation
    return BlockedCollective(one.group, one.sequence, {rank: one}).words


def newest(told: FlightRecorderDump) -> Sequence[Collective]:
    """Return what is not over, the oldest first, and the newest of each group."""
    pending = [one for one in told.collectives if not one.done][:PENDING]
    chosen = {id(one) for one in pending}
    counts: dict[str, int] = {}
    for one in reversed(told.collectives):
        if counts.setdefault(one.group, 0) < KEPT:
            counts[one.group] += 1
            chosen.add(id(one))
    return [one for one in told.collectives if id(one) in chosen]
