"""Read the Python stack of a failed allocation: phase of the step, model, inputs, lines of code.

Only local variables of torch's frames are read, never those of the script. No frame is kept. torch
is found in `sys.modules`.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepscope.common.json_values import to_text
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER

MAX_FRAMES = 40  # Maximum number of frames in a record, the innermost.
MAX_DEPTH = 400  # Maximum number of frames that are read.
MAX_INPUTS = 8
_PACKAGE = f"{Path(__file__).resolve().parents[2].as_posix()}/"
_OPTIMIZING = ("torch/optim/", "torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py")


def here(own_parts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the stack fields of a record for the calling thread.

    In a thread of autograd the stack continues with the thread that waits in `backward()`. There
    autocast is unknown: its state is that of the thread, not of the forward pass.
    `own_parts` maps the end of a file's path to the phase of a step.
    """
    frames = _frames(sys._getframe(1))
    if _is_python_thread():
        torch = sys.modules.get("torch")
        if torch is None:
            return _place(frames, own_parts)
        modes = {"grad": torch.is_grad_enabled(), "autocast": _is_in_autocast(torch)}
        return _place(frames, own_parts) | modes
    return _place([*frames, *_waiting_in_backward()], own_parts) | {"phase": BACKWARD}


def _is_in_autocast(torch: Any) -> bool:
    """Return True in a context of `torch.autocast` that is enabled for CUDA.

    `torch.is_autocast_enabled` is False within an operator that autocast runs in another type.
    """
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:  # the usual case: nothing is searched
        return False
    contexts = (one for one in gc.get_objects() if issubclass(type(one), torch.autocast))
    return any(context._enabled and context.device == "cuda" for context in contexts)


def of_traceback(
    trace: TracebackType | None, own_parts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the stack fields of a record for the origin of an exception."""
    frames = [frame for frame, _ in islice(traceback.walk_tb(trace), MAX_DEPTH)]
    return _place(frames[::-1], own_parts)


def _place(frames: Sequence[FrameType], own_parts: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the fields for these frames, the innermost first."""
    # Without frames of this package, and of Python's start of a program.
    shown = [frame for frame in frames if not _file(frame).startswith((_PACKAGE, "<frozen "))]
    calls = [frame.f_locals for frame in shown if _is_model_call(frame)]
    training = getattr(calls[-1].get("self"), "training", None) if calls else None
    return {
        "phase": _phase(shown, own_parts or {}),
        "training": training if isinstance(training, bool) else None,
        "inputs": tuple(_shapes(calls[-1])) if calls else (),
        "stack": tuple(_line(frame) for frame in shown[:MAX_FRAMES]),
    }


def _frames(frame: FrameType) -> list[FrameType]:
    return [outer for outer, _ in islice(traceback.walk_stack(frame), MAX_DEPTH)]


def _is_python_thread() -> bool:
    """Return True if Python started this thread: those of autograd start in C++."""
    own = [thread for thread in threading.enumerate() if thread.ident == threading.get_ident()]
    return any(not isinstance(thread, threading._DummyThread) for thread in own)


def _waiting_in_backward() -> list[FrameType]:
    """Return the stack of another thread that waits in `backward()`; [] without one."""
    for thread, frame in sys._current_frames().items():
        frames = _frames(frame)
        if thread != threading.get_ident() and any(map(_is_backward, frames)):
            return frames
    return []


def _phase(frames: Sequence[FrameType], own_parts: Mapping[str, str]) -> str | None:
    """Return the phase of the step: the innermost, or a backward pass around a forward pass."""
    phases = [phase for phase in (_frame_phase(frame, own_parts) for frame in frames) if phase]
    is_recomputed = phases[:1] == [FORWARD] and BACKWARD in phases
    return BACKWARD if is_recomputed else next(iter(phases), None)


def _frame_phase(frame: FrameType, own_parts: Mapping[str, str]) -> str | None:
    file = _file(frame)
    if any(part in file for part in _OPTIMIZING):
        return OPTIMIZER if frame.f_code.co_name != "scale" else None
    if _is_backward(frame):
        return BACKWARD
    if _is_model_call(frame):
        return FORWARD
    if "/torch/utils/data/" in file:
        return DATA
    return next((part for end, part in own_parts.items() if file.endswith(end)), None)


def _is_backward(frame: FrameType) -> bool:
    names = ("_engine_run_backward", "backward", "grad")
    return "/torch/autograd/" in _file(frame) and frame.f_code.co_name in names


def _is_model_call(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_call_impl" and _file(frame).endswith("nn/modules/module.py")


def _shapes(call: Mapping[str, Any]) -> Iterator[str]:
    """Yield the shapes of a module's input tensors, from the local variables of its call."""
    args, kwargs = call.get("args"), call.get("kwargs")
    values = list(args) if isinstance(args, tuple | list) else []
    values += kwargs.values() if isinstance(kwargs, dict) else ()
    for value in values[:MAX_INPUTS]:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):  # as torch.Size is
            yield " × ".join(str(int(length)) for length in shape) or "scalar"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def _line(frame: FrameType) -> str:
    return to_text(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")[-300:]
