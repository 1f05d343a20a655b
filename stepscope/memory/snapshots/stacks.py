"""Stack frames of an allocation as text, and the module that a stack names; pure.

torch lists frames from the innermost to the outermost, each as a dict of `filename`, `line` and
`name`. Files may be foreign: whatever is not such a frame is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from stepscope.common.formatting import printable

FRAMES_LIMIT = 128  # Frames kept of a stack, the innermost ones; those of C++ make up to 100.
TEXT_LIMIT = 300  # Characters kept of a file's name, its end, and of a function's.
_MODULE_CALL = re.compile(
    r"torch[/\\]nn[/\\]modules[/\\]module\.py:\d+ in (.*\.)?(_wrapped)?_call_impl$"
)


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

    Frames name functions, not classes. So a module is named only by a `forward` that `nn.Module`
    has called: by the file of that `forward`, and by the line that called the module, which
    distinguishes two layers of one class.

    >>> call = "/lib/torch/nn/modules/module.py:1780 in _call_impl"
    >>> linear = "/lib/torch/nn/modules/linear.py:134 in forward"
    >>> module_of([linear, call, "/me/net.py:9 in forward", call, "/me/train.py:3 in step"])
    'torch.nn.modules.linear, called at net.py:9'
    >>> module_of(["/me/net.py:9 in forward", "/me/train.py:3 in step"]) is None
    True
    """
    for place, frame in enumerate(frames):
        outer = frames[place + 1 :]
        is_forward = frame.endswith((" in forward", ".forward"))
        if is_forward and outer and _MODULE_CALL.search(outer[0]):
            caller = next((one for one in outer if not _MODULE_CALL.search(one)), None)
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


NO_STACK = -1  # The number of an allocation whose stack was not recorded, or is one too many.
STACKS_LIMIT = 100_000  # Distinct stacks kept; programs have some thousand.
TEXTS_LIMIT = 200_000  # Distinct frames kept.


class StackTable:
    """Numbers stacks from 0; `left_out` counts lists of frames beyond the limits."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """The distinct frames."""
        self.frames: list[tuple[int, ...]] = []
        """For each stack its frames, as indices of `texts`, innermost first."""
        self.left_out = 0
        self._by_frames: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._by_text: dict[str, int] = {}
        self._by_ids: dict[tuple[int, ...], int] = {}
        self._alive: list[object] = []  # frames in `_by_ids`: no other object can get their ids

    def number(self, frames: object) -> int:
        """Return the number of a list of frames."""
        if not isinstance(frames, list | tuple):
            return NO_STACK
        frames = frames[:FRAMES_LIMIT]
        ids = tuple(map(id, frames))
        found = self._by_ids.get(ids)
        if found is None:
            places = tuple(place for place in map(self._place, frames) if place >= 0)
            found = self._by_frames.get(places)
            if found is None and len(self.frames) >= STACKS_LIMIT:
                self.left_out += 1
                return NO_STACK
            if found is None:
                found = self._by_frames[places] = len(self.frames)
                self.frames.append(places)
            if len(self._by_ids) < STACKS_LIMIT:
                self._by_ids[ids] = found
                self._alive.append(frames)
        return found

    def text(self, number: int) -> tuple[str, ...]:
        """Return the lines of a stack, () for NO_STACK."""
        if number == NO_STACK:
            return ()
        return tuple(self.texts[place] for place in self.frames[number])

    def _place(self, frame: object) -> int:
        """Return the index of a frame in `texts`, -1 for an invalid one."""
        text = frame_text(frame)
        if text is None or (text not in self._by_text and len(self.texts) >= TEXTS_LIMIT):
            return -1
        if text not in self._by_text:
            self._by_text[text] = len(self.texts)
            self.texts.append(text)
        return self._by_text[text]
