"""Stack frames of an allocation as text, and the module of a stack; pure, no I/O.

torch lists frames innermost first. Files are untrusted: malformed frames are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from stepscope.common.formatting import printable

MAX_FRAMES = 128  # Maximum frames per stack, the innermost ones; those of C++ make up to 100.
MAX_TEXT_CHARS = 300  # Maximum length of a file's name, from its end, and of a function's.
MAX_STACKS = 100_000  # Maximum number of distinct stacks; programs have some thousand.
MAX_TEXTS = 200_000  # Maximum number of distinct frames.
NO_STACK = -1  # The number of a stack that was not recorded, or exceeds MAX_STACKS.
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3", "<frozen ")
_MODULE_CALL = re.compile(
    r"torch[/\\]nn[/\\]modules[/\\]module\.py:\d+ in (.*\.)?(_wrapped)?_call_impl$"
)


def frame_text(frame: object) -> str | None:
    """Return a frame as one line; None if it is malformed or names no place.

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
    place = printable(filename[-MAX_TEXT_CHARS:]) or "??"
    if type(line) is int and 0 < line < 10**9:
        place += f":{line}"
    return f"{place} in {printable(name[:MAX_TEXT_CHARS])}"


def module_of(frames: Sequence[str]) -> str | None:
    """Return the innermost module whose `forward` made the allocation; None if unclear.

    Frames name functions, not classes. So a module is identified only by a `forward` that
    `nn.Module` has called: by the file of that `forward`, and by the line that called the module,
    which distinguishes two layers of one class.

    >>> call = "/lib/torch/nn/modules/module.py:1780 in _call_impl"
    >>> linear = "/lib/torch/nn/modules/linear.py:134 in forward"
    >>> module_of([linear, call, "/me/net.py:9 in forward", call, "/me/train.py:3 in step"])
    'torch.nn.modules.linear, called at net.py:9'
    >>> module_of(["/me/net.py:9 in forward", "/me/train.py:3 in step"]) is None
    True
    """
    for place, frame in enumerate(frames[:-1]):
        if frame.endswith((" in forward", ".forward")) and _MODULE_CALL.search(frames[place + 1]):
            outer = (one for one in frames[place + 1 :] if not _MODULE_CALL.search(one))
            caller = next(outer, None)
            at = "" if caller is None else f", called at {short(caller).rpartition(' in ')[0]}"
            return f"{_module_file(frame)}{at}"
    return None


def _module_file(frame: str) -> str:
    """Return a frame's file name, or the module name of a file of torch."""
    file = frame.rpartition(" in ")[0].rpartition(":")[0]
    path = PurePosixPath(file.replace("\\", "/"))
    parts = (*path.parts[:-1], path.stem)
    if "torch" in parts:
        return ".".join(parts[len(parts) - 1 - parts[::-1].index("torch") :])
    return path.name


def own_frame(frames: Sequence[str]) -> str | None:
    """Return the innermost frame outside of installed packages, else the innermost of all.

    >>> own_frame(["/v/site-packages/torch/functional.py:5 in dot", "/me/net.py:7 in forward"])
    '/me/net.py:7 in forward'
    """
    own = (frame for frame in frames if not any(part in frame for part in _INSTALLED))
    return next(own, frames[0] if frames else None)


def short(frame: str) -> str:
    """Return a frame with the last part of its path alone.

    >>> short("/home/me/train.py:12 in loss")
    'train.py:12 in loss'
    """
    place, _, name = frame.rpartition(" in ")
    return f"{place.replace(chr(92), '/').rpartition('/')[2]} in {name}"


class StackTable:
    """Numbers stacks from 0, up to the limits."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # The distinct frames.
        self.frames: list[tuple[int, ...]] = []  # Indices of `texts`, innermost first.
        self._by_frames: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._by_text: dict[str, int] = {}
        self._by_ids: dict[tuple[int, ...], int] = {}
        self._alive: list[object] = []  # frames in `_by_ids`: no other object can get their ids

    def number(self, frames: object) -> int:
        """Return the number of a list of frames."""
        if not isinstance(frames, list | tuple):
            return NO_STACK
        frames = frames[:MAX_FRAMES]
        ids = tuple(map(id, frames))
        number = self._by_ids.get(ids)
        if number is None:
            places = tuple(place for place in map(self._place, frames) if place >= 0)
            number = self._by_frames.get(places)
            if number is None and len(self.frames) >= MAX_STACKS:
                return NO_STACK
            if number is None:
                number = self._by_frames[places] = len(self.frames)
                self.frames.append(places)
            if len(self._by_ids) < MAX_STACKS:
                self._by_ids[ids] = number
                self._alive.append(frames)
        return number

    def _place(self, frame: object) -> int:
        """Return the index of a frame in `texts`, -1 for an invalid one."""
        text = frame_text(frame)
        if text is None or (text not in self._by_text and len(self.texts) >= MAX_TEXTS):
            return -1
        if text not in self._by_text:
            self._by_text[text] = len(self.texts)
            self.texts.append(text)
        return self._by_text[text]
