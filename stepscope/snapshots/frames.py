"""Stack frames of an allocation as text, and the module that a stack names; pure.

torch lists frames from the innermost to the outermost, each as a dict of `filename`, `line` and
`name`. Files may be foreign: whatever is not such a frame is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from stepscope.formatting import printable

FRAMES_LIMIT = 64
"""Frames kept of a stack, the innermost ones; C++ stacks have some 100."""
TEXT_LIMIT = 300
"""Characters kept of a file's name, its end, and of a function's."""
_MODULE_FILE = "torch/nn/modules/module.py"
_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")


def frame_text(frame: object) -> str | None:
    """Return a frame as one line; None for what is no frame or names no place.

    >>> frame_text({"filename": "/home/me/train.py", "line": 12, "name": "loss"})
    '/home/me/train.py:12 in loss'
    """
    if type(frame) is not dict:
        return None
    filename, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if not isinstance(filename, str) or not isinstance(name, str):
        return None
    if filename in ("", "??") and name in ("", "??"):
        return None
    where = printable(filename[-TEXT_LIMIT:]) or "??"
    if type(line) is int and 0 < line < 10**9:
        where += f":{line}"
    return f"{where} in {printable(name[:TEXT_LIMIT])}"


def stack_texts(frames: object) -> tuple[str, ...]:
    """Return a stack's frames as lines, innermost first; () where there is none."""
    if not isinstance(frames, list | tuple):
        return ()
    texts = (frame_text(frame) for frame in frames[:FRAMES_LIMIT])
    return tuple(text for text in texts if text is not None)


def module_of(frames: Sequence[str]) -> str | None:
    """Return the innermost module whose `forward` made the allocation; None where unclear.

    Frames name functions, not classes. So a module is told only by a `forward` that `nn.Module`
    itself has called, as the file of that `forward`, or as its class where the frame has the
    function's qualified name.

    >>> call = "/lib/torch/nn/modules/module.py:1780 in _call_impl"
    >>> module_of(["/lib/torch/nn/modules/linear.py:134 in forward", call])
    'torch.nn.modules.linear'
    >>> module_of(["/me/net.py:7 in act", "/me/net.py:9 in Block.forward", call])
    'Block (net.py)'
    >>> module_of(["/me/net.py:9 in forward"]) is None
    True
    """
    for inner, outer in zip(frames, frames[1:], strict=False):
        if _function(inner) == "forward" and _is_module_call(outer):
            return _module_name(inner)
    return None


def _module_name(frame: str) -> str:
    where, _, name = frame.rpartition(" in ")
    path = PurePosixPath(where.rpartition(":")[0].replace("\\", "/"))
    owner = name.rpartition(".forward")[0]
    if owner:
        return f"{owner} ({path.name})"
    parts = path.with_suffix("").parts
    if "torch" in parts:
        return ".".join(parts[len(parts) - 1 - parts[::-1].index("torch") :])
    return path.name


def _function(frame: str) -> str:
    """Return the last part of a frame's function, without the classes around it."""
    return frame.rpartition(" in ")[2].rpartition(".")[2]


def _is_module_call(frame: str) -> bool:
    where = frame.rpartition(" in ")[0].replace("\\", "/").rpartition(":")[0]
    return where.endswith(_MODULE_FILE) and _function(frame) in _MODULE_CALLS
