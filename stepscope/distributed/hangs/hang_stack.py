"""Where the training thread is, by its Python stack: a look of microseconds by another thread.

The look needs the GIL, as all Python does, and stops nothing. A thread that is in a C call, such as
a collective's wait, is seen at the line that calls it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from stepscope.distributed.hangs.diagnose import COMPILING
from stepscope.distributed.hangs.record import Frame

DEEPEST = 200
"""Frames that are looked at."""
MAX_FRAMES = 12
"""Frames that are kept, the innermost ones."""
TEXT = 200
"""Characters of a file's path that are kept: its end."""

_PHASES = (
    ("torch/distributed/", "communication"),
    ("torch/utils/data/", "input"),
    ("torch/autograd/", "backward"),
    ("torch/_tensor.py", "backward"),
    ("torch/optim/", "optimizer"),
    ("torch/nn/modules/", "forward"),
)
_NO_PHASE = (
    "torch/distributed/elastic/",
    "torch/distributed/launcher/",
    "torch/distributed/run.py",
)
"""The launcher's own frames lie around a whole training."""
_DOING = (
    ("torch/_dynamo/convert_frame.py", COMPILING),
    ("torch/_inductor/compile_fx.py", COMPILING),
    ("torch/serialization.py", "saving or loading a file"),
    ("torch/distributed/checkpoint/", "saving or loading a checkpoint"),
)
_LIBRARIES = tuple(
    f"{path}/"
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(__file__).resolve().parents[1]),
    }
)


def frames_of(thread: int) -> tuple[Frame, ...]:
    """Return the stack of a thread by its number, the innermost frame first; () where it ended."""
    frame = sys._current_frames().get(thread)
    found: list[Frame] = []
    while frame is not None and len(found) < DEEPEST:
        file = frame.f_code.co_filename
        found.append(
            Frame(file=file, line=frame.f_lineno, function=frame.f_code.co_name, own=_is_own(file))
        )
        frame = frame.f_back
    return tuple(found)


def kept(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames to keep: the innermost, and the innermost of the user's own code."""
    own = [frame for frame in frames[MAX_FRAMES:] if frame.own][:1]
    if any(frame.own for frame in frames[:MAX_FRAMES]):
        own = []
    return tuple(
        Frame(
            file=frame.file[-TEXT:],
            line=frame.line,
            function=frame.function[:TEXT],
            own=frame.own,
        )
        for frame in (*frames[:MAX_FRAMES], *own)
    )


def phase_of(frames: Iterable[Frame]) -> str | None:
    """Return the part of the step that the innermost frame of torch tells; None for none."""
    for frame in frames:
        if any(part in frame.file for part in _NO_PHASE):
            continue
        for part, phase in _PHASES:
            if part in frame.file:
                return phase
    return None


def doing_of(frames: Iterable[Frame]) -> str | None:
    """Return what the thread does that is no part of a step."""
    for frame in frames:
        for part, doing in _DOING:
            if part in frame.file:
                return doing
    return None


def _is_own(file: str) -> bool:
    if file.startswith("<") or "site-packages/" in file or "dist-packages/" in file:
        return False
    return not file.startswith(_LIBRARIES)
