"""Stack frames of an allocation as text, and the module that a stack names; pure.

torch lists frames from the innermost to the outermost, each as a dict of `filename`, `line` and
`name`. Files may be foreign: whatever is not such a frame is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

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


NO_STACK = -1
"""The number of an allocation whose stack was not recorded, or is one too many."""
STACKS_LIMIT = 100_000
"""Distinct stacks kept; programs have some thousand."""
TEXTS_LIMIT = 200_000
"""Distinct frames kept."""


class StackTable:
    """Gives stacks their numbers, from 0 on; `left_out` counts lists beyond the limits."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """The distinct frames."""
        self.frames: list[tuple[int, ...]] = []
        """Of each stack its frames, as places in `texts`, innermost first."""
        self.left_out = 0
        self._by_frames: dict[tuple[int, ...], int] = {}
        self._by_ids: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._place: dict[str, int] = {}
        # Of each distinct frame the first object, kept alive: no other can get its identity.
        self._places_by_id: dict[int, int] = {}
        self._alive: list[object] = []

    def number(self, frames: object) -> int:
        """Return the number of a list of frames."""
        if not isinstance(frames, list | tuple) or not frames:
            return NO_STACK
        found = self._by_ids.get(tuple(map(id, frames[:FRAMES_LIMIT])))
        return self._add(frames[:FRAMES_LIMIT]) if found is None else found

    def text(self, number: int) -> tuple[str, ...]:
        """Return the lines of a stack, () for NO_STACK."""
        if number == NO_STACK:
            return ()
        return tuple(self.texts[place] for place in self.frames[number])

    def _add(self, frames: list[Any] | tuple[Any, ...]) -> int:
        places = []
        shared = True
        for frame in frames:
            place = self._places_by_id.get(id(frame))
            if place is None:
                place, kept = self._add_frame(frame)
                shared = shared and kept
            if place >= 0:
                places.append(place)
        key = tuple(places)
        found = self._by_frames.get(key)
        if found is None:
            found = self._new(key)
        if shared and found >= 0:
            self._by_ids[tuple(map(id, frames))] = found
        return found

    def _new(self, key: tuple[int, ...]) -> int:
        if not key:
            return NO_STACK
        if len(self.frames) >= STACKS_LIMIT:
            self.left_out += 1
            return NO_STACK
        number = self._by_frames[key] = len(self.frames)
        self.frames.append(key)
        return number

    def _add_frame(self, frame: object) -> tuple[int, bool]:
        """Return the place of a frame, -1 for what is none, and whether it is the first such."""
        text = frame_text(frame) or ""
        place = self._place.get(text)
        if place is not None:
            return place, False
        place = len(self.texts)
        if text == "" or place >= TEXTS_LIMIT:
            place = -1
        if place < 0 and "" in self._place:
            return place, False
        if place >= 0:
            self.texts.append(text)
        self._place[text if place >= 0 else ""] = place
        self._places_by_id[id(frame)] = place
        self._alive.append(frame)
        return place, True
