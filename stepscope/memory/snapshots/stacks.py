"""Stack frames of an allocation as text, and the module that a stack names; pure.

torch lists frames from the innermost to the outermost, each as a dict of `filename`, `line` and
`name`. Files may be foreign: whatever is not such a frame is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from stepscope.common.formatting import printable

FRAMES_LIMIT = 128
"""Frames kept of a stack, the innermost ones; those of C++ make up to 100."""
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
    itself has called: as the file of that `forward`, and the line that called the module, which
    tells two layers of one class apart.

    >>> call = "/lib/torch/nn/modules/module.py:1780 in _call_impl"
    >>> linear = "/lib/torch/nn/modules/linear.py:134 in forward"
    >>> module_of([linear, call, "/me/net.py:9 in forward", call, "/me/train.py:3 in step"])
    'torch.nn.modules.linear, called at net.py:9'
    >>> module_of(["/me/net.py:9 in forward", "/me/train.py:3 in step"]) is None
    True
    """
    for place, frame in enumerate(frames):
        outer = frames[place + 1 :]
        if _function(frame) == "forward" and outer and _is_module_call(outer[0]):
            caller = next((one for one in outer if not _is_module_call(one)), None)
            at = "" if caller is None else f", called at {short(caller).rpartition(' in ')[0]}"
            return f"{_file_of(frame)}{at}"
    return None


def _file_of(frame: str) -> str:
    """Return a file's name, of one of torch's own the name of its module."""
    where = frame.rpartition(" in ")[0].rpartition(":")[0]
    path = PurePosixPath(where.replace("\\", "/"))
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


def own_frame(frames: Sequence[str]) -> str | None:
    """Return the innermost frame outside of installed packages, else the innermost of all.

    >>> own_frame(["/v/site-packages/torch/functional.py:5 in dot", "/me/net.py:7 in forward"])
    '/me/net.py:7 in forward'
    """
    own = (frame for frame in frames if not any(part in frame for part in _INSTALLED))
    return next(own, frames[0] if frames else None)


_INSTALLED = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3", "<frozen ")


def short(frame: str) -> str:
    """Return a frame with the last part of its path alone.

    >>> short("/home/me/train.py:12 in loss")
    'train.py:12 in loss'
    """
    where, _, name = frame.rpartition(" in ")
    return f"{where.replace(chr(92), '/').rpartition('/')[2]} in {name}"
