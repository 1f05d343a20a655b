"""Read the stack and the collectives of a rank without a step, without blocking the rank."""

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
from stepscope.distributed.hangs.record import KEPT, HangRecord, StackFrame

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


def newest(dump: FlightRecorderDump) -> Sequence[Collective]:
    """Return the oldest pending collectives, and the newest of each group, in order."""
    pending = [one for one in dump.collectives if not one.done][:PENDING]
    chosen = {id(one) for one in pending}
    counts: dict[str, int] = {}
    for one in reversed(dump.collectives):
        if counts.setdefault(one.group, 0) < KEPT:
            counts[one.group] += 1
            chosen.add(id(one))
    return [one for one in dump.collectives if id(one) in chosen]
