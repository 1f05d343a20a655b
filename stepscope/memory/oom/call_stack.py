"""The Python stack of a failed allocation: part of the step, model, inputs, lines of code.

Only local variables of torch's frames are read, those of the script are not. No frame is kept.
torch is found in `sys.modules`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepscope.common.json_values import to_text
from stepscope.memory.oom.record import OptimizerMemory
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER

VALIDATION = "validation"
FRAMES = 40  # Frames that are kept, the innermost ones.
DEPTH = 400  # Frames that are read.
INPUTS = 8
TENSORS = 200_000  # Maximum number of an optimizer's tensors that are added up.
_PACKAGE = f"{Path(__file__).resolve().parents[2].as_posix()}/"
_OPTIMIZING = ("torch/optim/", "torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py")
TrainingModeLookup = Callable[[Any], bool | None]
"""Returns True if a model was in training mode when steps ended; None if not known."""
_EVALUATES = re.compile(r"_*(valid|eval|test$|test_(step|epoch|loop))")
_STATES = {"adamax": 2, "adam": 2, "lion": 1, "sgd": 1, "adagrad": 1, "rmsprop": 1}
"""Tensors of the size of a parameter that the common optimizers keep; the first match counts."""


def here(
    own_parts: Mapping[str, str] | None = None, mode_at_steps: TrainingModeLookup | None = None
) -> dict[str, Any]:
    """Return the fields of a record about the place of the calling thread.

    In autograd's threads it is that of `backward()`. `own_parts` gives the part of a step by the
    end of a file's path.
    """
    frames = list(_outward(sys._getframe(1)))
    if _is_script():
        torch = sys.modules.get("torch")
        grad = None if torch is None else bool(torch.is_grad_enabled())
        return _place(frames, own_parts, mode_at_steps, grad=grad)
    waiting = next(_in_backward(), [])
    return _place([*frames, *waiting], own_parts, phase=BACKWARD)


def of_traceback(
    trace: TracebackType | None,
    own_parts: Mapping[str, str] | None = None,
    mode_at_steps: TrainingModeLookup | None = None,
) -> dict[str, Any]:
    """Return the place that an exception came from."""
    frames: list[FrameType] = []
    while trace is not None and len(frames) < DEPTH:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return _place(frames[::-1], own_parts, mode_at_steps)


def _place(
    frames: Sequence[FrameType],
    own_parts: Mapping[str, str] | None = None,
    mode_at_steps: TrainingModeLookup | None = None,
    *,
    phase: str | None = None,
    grad: bool | None = None,
) -> dict[str, Any]:
    """Return the fields for these frames, the innermost first.

    It is a validation if the outermost model is in evaluation mode and was not when steps ended:
    some scripts train in evaluation mode, with frozen statistics. `function` is the name of the
    function that evaluates.
    """
    # Without frames of this package, and of Python's start of a program.
    shown = [frame for frame in frames if not _file(frame).startswith((_PACKAGE, "<frozen "))]
    calls = [frame.f_locals for frame in shown if _is_model_call(frame)]
    model = calls[-1].get("self") if calls else None
    training = getattr(model, "training", None)
    names = (frame.f_code.co_name for frame in shown if "/torch/" not in _file(frame))
    function = next((name for name in names if _EVALUATES.match(name)), None)
    phase = phase or _phase(shown, own_parts or {})
    at_steps = None if model is None or mode_at_steps is None else mode_at_steps(model)
    if phase == FORWARD and training is False and at_steps is True:
        phase = VALIDATION
    return {
        "phase": phase,
        "training": training if isinstance(training, bool) else None,
        "training_at_steps": at_steps,
        "grad": grad,
        "function": function if phase == VALIDATION else None,
        "inputs": tuple(_shapes(calls[-1])) if calls else (),
        "optimizer": _optimizer(shown) if phase == OPTIMIZER else None,
        "stack": tuple(_line(frame) for frame in shown[:FRAMES]),
    }


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_script() -> bool:
    """Return True if Python started this thread: those of autograd start in C++."""
    own = [one for one in threading.enumerate() if one.ident == threading.get_ident()]
    return any(not isinstance(one, threading._DummyThread) for one in own)


def _in_backward() -> Iterator[list[FrameType]]:
    """Yield the stacks of the other threads that wait in `backward()`."""
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        frames = list(_outward(frame))
        if thread != own and any(_is_backward(each) for each in frames):
            yield frames


def _phase(frames: Sequence[FrameType], own_parts: Mapping[str, str]) -> str | None:
    """Return the part of the step; a backward pass may compute a forward pass again within."""
    found = None
    for frame in frames:
        part = _part(frame, own_parts)
        if part in (OPTIMIZER, BACKWARD, DATA) and found is None:
            return part
        if part == BACKWARD:
            return part
        found = found or part
    return found


def _part(frame: FrameType, own_parts: Mapping[str, str]) -> str | None:
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
    """Yield the shapes of the tensors that a module was called with, from its local variables."""
    args, kwargs = call.get("args"), call.get("kwargs")
    given = list(args) if isinstance(args, tuple | list) else []
    given += kwargs.values() if isinstance(kwargs, dict) else ()
    for value in given[:INPUTS]:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):  # as torch.Size is
            yield " × ".join(str(int(length)) for length in shape) or "one number"


def _optimizer(frames: Sequence[FrameType]) -> OptimizerMemory | None:
    """Return the memory of the optimizer that steps."""
    for frame in frames:
        if "/torch/optim/" in _file(frame):
            for name in ("self", "optimizer"):
                if hasattr(frame.f_locals.get(name), "param_groups"):
                    return optimizer_state(frame.f_locals[name])
    return None


def optimizer_state(optimizer: Any) -> OptimizerMemory:
    """Return the bytes of an optimizer's parameters and state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]][:TENSORS]
    trained = [p for p in parameters if getattr(p, "grad", None) is not None]
    state = optimizer.state
    kept = [v for p in parameters if p in state for v in getattr(state[p], "values", tuple)()]
    name = type(optimizer).__name__
    factor = _factor(name.lower(), optimizer.param_groups[0] if optimizer.param_groups else {})
    return OptimizerMemory(
        name=name,
        parameters=_bytes(parameters),
        state=_bytes(value for value in kept if getattr(value, "is_cuda", False)),
        expected=None if factor is None else factor * _bytes(trained),
    )


def _factor(name: str, group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size an optimizer keeps; None if not known."""
    known = next((number for word, number in _STATES.items() if word in name), None)
    if known == 2 and group.get("amsgrad") is True:
        return 3
    return 0 if name == "sgd" and not group.get("momentum") else known


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
