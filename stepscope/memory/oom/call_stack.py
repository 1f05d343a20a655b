"""Read the Python stack of a failed allocation: phase of the step, model, inputs, lines of code.

Only local variables of torch's frames are read, never those of the script. No frame is kept. torch
is found in `sys.modules`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepscope.common.json_values import to_text
from stepscope.memory import model_states
from stepscope.memory.oom.record import OptimizerMemory
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER

VALIDATION = "validation"
MAX_FRAMES = 40  # Maximum number of frames in a record, the innermost.
MAX_DEPTH = 400  # Maximum number of frames that are read.
MAX_INPUTS = 8
MAX_TENSORS = 200_000  # Maximum number of an optimizer's tensors that are added up.
_PACKAGE = f"{Path(__file__).resolve().parents[2].as_posix()}/"
_OPTIMIZING = ("torch/optim/", "torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py")
TrainingModeLookup = Callable[[Any], bool | None]
"""Returns True if a model was in training mode when steps ended; None if unknown."""
_EVALUATES = re.compile(r"_*(valid|eval|test$|test_(step|epoch|loop))")
_STATES = {"adamax": 2, "adam": 2, "lion": 1, "sgd": 1, "adagrad": 1, "rmsprop": 1}
"""Number of tensors that the common optimizers keep per parameter; the first match counts."""


def here(
    own_parts: Mapping[str, str] | None = None, mode_at_steps: TrainingModeLookup | None = None
) -> dict[str, Any]:
    """Return the stack fields of a record for the calling thread.

    In a thread of autograd the stack continues with the thread that waits in `backward()`.
    `own_parts` maps the end of a file's path to the phase of a step.
    """
    frames = _frames(sys._getframe(1))
    if _is_python_thread():
        torch = sys.modules.get("torch")
        grad = None if torch is None else bool(torch.is_grad_enabled())
        return _place(frames, own_parts, mode_at_steps) | {"grad": grad}
    return _place([*frames, *_waiting_in_backward()], own_parts) | {"phase": BACKWARD}


def of_traceback(
    trace: TracebackType | None,
    own_parts: Mapping[str, str] | None = None,
    mode_at_steps: TrainingModeLookup | None = None,
) -> dict[str, Any]:
    """Return the stack fields of a record for the origin of an exception."""
    frames = [frame for frame, _ in islice(traceback.walk_tb(trace), MAX_DEPTH)]
    return _place(frames[::-1], own_parts, mode_at_steps)


def _place(
    frames: Sequence[FrameType],
    own_parts: Mapping[str, str] | None,
    mode_at_steps: TrainingModeLookup | None = None,
) -> dict[str, Any]:
    """Return the fields for these frames, the innermost first.

    The phase is a validation if the outermost model is in evaluation mode and was in training mode
    when steps ended: some scripts train in evaluation mode, with frozen statistics.
    """
    # Without frames of this package, and of Python's start of a program.
    shown = [frame for frame in frames if not _file(frame).startswith((_PACKAGE, "<frozen "))]
    calls = [frame.f_locals for frame in shown if _is_model_call(frame)]
    model = calls[-1].get("self") if calls else None
    training = getattr(model, "training", None)
    at_steps = None if model is None or mode_at_steps is None else mode_at_steps(model)
    phase, function = _phase(shown, own_parts or {}), None
    if phase == FORWARD and training is False and at_steps is True:
        phase = VALIDATION
        names = (frame.f_code.co_name for frame in shown if "/torch/" not in _file(frame))
        function = next((name for name in names if _EVALUATES.match(name)), None)
    return {
        "phase": phase,
        "training": training if isinstance(training, bool) else None,
        "training_at_steps": at_steps,
        "grad": None,
        "function": function,
        "inputs": tuple(_shapes(calls[-1])) if calls else (),
        "optimizer": _optimizer(shown) if phase == OPTIMIZER else None,
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


def _optimizer(frames: Sequence[FrameType]) -> OptimizerMemory | None:
    """Return the memory of the optimizer that steps; None if no frame has it."""
    for frame in frames:
        if "/torch/optim/" in _file(frame):
            for name in ("self", "optimizer"):
                if hasattr(frame.f_locals.get(name), "param_groups"):
                    return optimizer_memory(frame.f_locals[name])
    return None


def optimizer_memory(optimizer: Any) -> OptimizerMemory:
    """Return the bytes of an optimizer's parameters and state."""
    parameters = list(islice(model_states.optimizer_parameters([optimizer]), MAX_TENSORS))
    state = islice(model_states.optimizer_state([optimizer]), MAX_TENSORS)
    factor = _state_factor(optimizer)
    trained = (one for one in parameters if getattr(one, "grad", None) is not None)
    return OptimizerMemory(
        name=type(optimizer).__name__,
        parameters=_bytes(parameters),
        state=_bytes(tensor for tensor in state if getattr(tensor, "is_cuda", False)),
        expected=None if factor is None else factor * _bytes(trained),
    )


def _state_factor(optimizer: Any) -> int | None:
    """Return the number of tensors that an optimizer keeps per parameter; None if unknown."""
    name = type(optimizer).__name__.lower()
    group: Mapping[str, Any] = next(iter(optimizer.param_groups), {})
    if name == "sgd" and not group.get("momentum"):
        return 0
    factor = next((number for word, number in _STATES.items() if word in name), None)
    return 3 if factor == 2 and group.get("amsgrad") is True else factor


def _bytes(tensors: Iterable[Any]) -> int:
    total = 0
    for tensor in tensors:
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):
            total += int(tensor.numel()) * int(tensor.element_size())
    return total


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def _line(frame: FrameType) -> str:
    return to_text(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")[-300:]
