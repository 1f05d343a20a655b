"""What the Python stack tells of a failed allocation: the part of the step, the model, the lines.

Only frames of torch are looked into; those of the script are named, and their variables left alone.
Nothing is kept of a frame. torch is found in `sys.modules`.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from stepscope.common.json_values import to_text
from stepscope.memory.oom.record import OptimizerMemory
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER

VALIDATION = "validation"
FRAMES = 40
"""Frames that are kept, the innermost ones."""
DEPTH = 400
"""Frames that are looked at."""
INPUTS = 8
TENSORS = 200_000
"""Tensors of an optimizer that are added up at most."""
_PACKAGE = f"{Path(__file__).resolve().parents[2].as_posix()}/"
_OPTIMIZING = ("torch/optim/", "torch/amp/grad_scaler.py", "torch/nn/utils/clip_grad.py")
TrainingModeLookup = Callable[[Any], bool | None]
"""Says whether a model was in training mode when steps ended; None where that is not known."""
_EVALUATES = re.compile(r"_*(valid|eval|test$|test_(step|epoch|loop))")
_STATES = {"adamax": 2, "adam": 2, "lion": 1, "sgd": 1, "adagrad": 1, "rmsprop": 1}
"""Tensors of the size of a parameter that the common optimizers keep; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSite:
    """Where an allocation failed.

    It is a validation where the outermost model is in evaluation mode and was not when steps
    ended: some train in evaluation mode, with frozen statistics. `function` then is the function
    that evaluates, by its name, if one does.
    """

    phase: str | None = None
    training: bool | None = None
    training_at_steps: bool | None = None
    function: str | None = None
    inputs: tuple[str, ...] = ()
    optimizer: OptimizerMemory | None = None
    stack: tuple[str, ...] = ()
    is_script: bool = True
    """Python began the thread: whether gradients are on says something then."""


def here(
    own_parts: Mapping[str, str] | None = None, mode_at_steps: TrainingModeLookup | None = None
) -> FailureSite:
    """Return the place of the calling thread; of autograd's own threads, that of `backward()`.

    `own_parts` gives the part of a step by the end of a file's path.
    """
    frames = list(_outward(sys._getframe(1)))
    if _is_script():
        return place(frames, own_parts, mode_at_steps)
    for waiting in _in_backward():
        return place([*frames, *waiting], own_parts, in_backward_thread=True)
    return place(frames, own_parts, in_backward_thread=True)


def of_traceback(
    trace: TracebackType | None,
    own_parts: Mapping[str, str] | None = None,
    mode_at_steps: TrainingModeLookup | None = None,
) -> FailureSite:
    """Return the place that an exception came from."""
    frames: list[FrameType] = []
    while trace is not None and len(frames) < DEPTH:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return place(frames[::-1], own_parts, mode_at_steps)


def place(
    frames: Sequence[FrameType],
    own_parts: Mapping[str, str] | None = None,
    mode_at_steps: TrainingModeLookup | None = None,
    *,
    in_backward_thread: bool = False,
) -> FailureSite:
    """Return what frames say, the innermost first."""
    shown = [frame for frame in frames if not _is_ours(frame)]
    model = _outermost_model(shown)
    training = getattr(model, "training", None)
    names = (frame.f_code.co_name for frame in shown if "/torch/" not in _file(frame))
    function = next((name for name in names if _EVALUATES.match(name)), None)
    phase = BACKWARD if in_backward_thread else _phase(shown, own_parts or {})
    at_steps = None if model is None or mode_at_steps is None else mode_at_steps(model)
    if phase == FORWARD and training is False and at_steps is True:
        phase = VALIDATION
    return FailureSite(
        phase=phase,
        training=training if isinstance(training, bool) else None,
        training_at_steps=at_steps,
        function=function if phase == VALIDATION else None,
        inputs=tuple(_inputs(shown)),
        optimizer=_optimizer(shown) if phase == OPTIMIZER else None,
        stack=tuple(_named(frame) for frame in shown[:FRAMES]),
        is_script=not in_backward_thread,
    )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_script() -> bool:
    """Say whether Python began this thread: those of autograd begin in C++."""
    own = threading.get_ident()
    known = (thread for thread in threading.enumerate() if thread.ident == own)
    return any(not isinstance(thread, threading._DummyThread) for thread in known)


def _in_backward() -> Iterator[list[FrameType]]:
    """Yield the stacks of the threads that wait in `backward()`."""
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


def _model_calls(frames: Sequence[FrameType]) -> list[FrameType]:
    return [frame for frame in frames if _is_model_call(frame)]


def _outermost_model(frames: Sequence[FrameType]) -> Any:
    calls = _model_calls(frames)
    return calls[-1].f_locals.get("self") if calls else None


def _inputs(frames: Sequence[FrameType]) -> Iterator[str]:
    """Yield the shapes of the tensors that the outermost model was called with."""
    calls = _model_calls(frames)
    if not calls:
        return
    local = calls[-1].f_locals
    given = [*_items(local.get("args")), *_items(local.get("kwargs"))]
    shapes = [getattr(value, "shape", None) for value in given[:INPUTS]]
    for shape in shapes:
        if isinstance(shape, tuple):  # as torch.Size is
            yield " × ".join(str(int(length)) for length in shape) or "one number"


def _items(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return list(values.values())
    return list(values) if isinstance(values, tuple | list) else []


def _optimizer(frames: Sequence[FrameType]) -> OptimizerMemory | None:
    """Return the memory of the optimizer that steps, by its own lists."""
    for frame in frames:
        if "/torch/optim/" not in _file(frame):
            continue
        names = [frame.f_locals.get(name) for name in ("self", "optimizer")]
        found = next((one for one in names if hasattr(one, "param_groups")), None)
        if found is not None:
            return optimizer_state(found)
    return None


def optimizer_state(optimizer: Any) -> OptimizerMemory | None:
    """Add up an optimizer's parameters and state; None where it is not made as torch's are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]][:TENSORS]
    trained = [p for p in parameters if getattr(p, "grad", None) is not None]
    state = optimizer.state
    held = {id(p): _state_bytes(state[p]) for p in parameters if p in state}
    whole = sum(map(_bytes, trained))
    name = type(optimizer).__name__
    factor = _factor(name.lower(), optimizer.param_groups[0] if optimizer.param_groups else {})
    return OptimizerMemory(
        name=name,
        parameters=sum(map(_bytes, parameters)),
        state=sum(held.values()),
        expected=None if factor is None else factor * whole,
        has_gradients=bool(trained),
    )


def _factor(name: str, group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size an optimizer keeps; None if not known."""
    known = next((number for word, number in _STATES.items() if word in name), None)
    if known == 2 and group.get("amsgrad") is True:
        return 3
    if name == "sgd" and not group.get("momentum"):
        return 0
    return known


def _state_bytes(state: Any) -> int:
    values = state.values() if hasattr(state, "values") else ()
    return sum(_bytes(value) for value in values if getattr(value, "is_cuda", False))


def _bytes(tensor: Any) -> int:
    try:
        return int(tensor.numel()) * int(tensor.element_size())
    except (AttributeError, TypeError, RuntimeError):
        return 0


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def _is_ours(frame: FrameType) -> bool:
    """Say whether a frame is one of this package, or of what starts a program."""
    return _file(frame).startswith((_PACKAGE, "<frozen "))


def _named(frame: FrameType) -> str:
    return to_text(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")[-300:]
