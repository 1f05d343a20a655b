"""Format the frames of an untrusted stack as text; torch lists them innermost first."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.common.formatting import printable

MAX_TEXT_CHARS = 300  # Of a file's name, from its end, and of a function's name.
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3", "<frozen ")


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


def where(frames: Sequence[str]) -> str:
    """Return the innermost line outside of installed packages, and the line that allocated.

    >>> where(["/v/site-packages/torch/functional.py:5 in dot", "/me/net.py:7 in forward"])
    'net.py:7 in forward, by functional.py:5 in dot'
    """
    if not frames:
        return "No stack recorded"
    own = (frame for frame in frames if not any(part in frame for part in _INSTALLED))
    line = next(own, frames[0])
    return short(line) if line == frames[0] else f"{short(line)}, by {short(frames[0])}"


def short(frame: str) -> str:
    """Return a frame with the last part of its path alone.

    >>> short("/home/me/train.py:12 in loss")
    'train.py:12 in loss'
    """
    place, _, name = frame.rpartition(" in ")
    return f"{place.replace(chr(92), '/').rpartition('/')[2]} in {name}"
