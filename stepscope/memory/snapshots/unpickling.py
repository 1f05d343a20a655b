"""A pickle of plain containers, read without calling anything that it names.

Python's unpickler in C with every way to a class or a function refused; runs of regular dicts are
read before it sees them. What is left can still ask for more memory than there is: a foreign file
belongs into a process with limits (`stepscope.memory.snapshots.write`).
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import IO, Any, NoReturn

from stepscope.memory.snapshots.pickle_loader import Regular

CHUNK = 2**20
"""Bytes looked at together."""
FRAME_LIMIT = 2**24
"""Python's pickler ends a frame at 64 KB; a larger one is left to the unpickler."""
_FRAME = 0x95

Progress = Callable[[int], None]
"""Called with the bytes read so far."""


class _Plain(pickle.Unpickler):
    """Refuses classes, functions and persistent objects."""

    def find_class(self, module: str, name: str) -> NoReturn:
        what = f"{module}.{name}"[:100]
        raise pickle.UnpicklingError(f"it names {what!r}, and only plain containers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


class _Opcodes(io.RawIOBase):
    """A pickle's opcodes without the regular runs, and without the frames around them.

    What does not stand in frames goes through as it is.
    """

    def __init__(self, file: IO[bytes], regular: Regular | None, progress: Progress) -> None:
        self._file = file
        self._regular = regular
        self._progress = progress
        self._ready = memoryview(b"")
        self._rest = b""
        self._framed = regular is not None
        self._begun = False

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; 0 at the end."""
        while not self._ready:
            data = self._next()
            if data is None:
                return 0
            self._ready = memoryview(data)
        wanted = memoryview(buffer)
        count = min(len(wanted), len(self._ready))
        wanted[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _next(self) -> bytes | None:
        """Return the next opcodes, None at the end."""
        if not self._framed or self._regular is None:
            data = self._rest + self._file.read(CHUNK)
            self._rest = b""
            self._progress(self._file.tell())
            return data or None
        parts, size = [self._rest], 0
        if not self._begun:
            self._begun = True
            parts.append(self._file.read(2))
            self._framed = parts[-1][:1] == b"\x80"
        while self._framed and size < CHUNK:
            frame = self._frame()
            parts.append(frame)
            size += len(frame)
        self._progress(self._file.tell())
        data, self._rest = self._regular.cut(b"".join(parts), last=not self._framed)
        return data

    def _frame(self) -> bytes:
        """Return the content of the next frame; of what is none, nothing: that ends the frames."""
        head = self._file.peek(1)[:1]  # type: ignore[attr-defined]
        if head != bytes([_FRAME]):
            self._framed = False
            return b""
        header = self._file.read(9)
        size = int.from_bytes(header[1:], "little")
        if len(header) < 9 or size > FRAME_LIMIT:
            self._framed = False
            return header
        return self._file.read(size)


class _Questions:
    """A file of little pickles, each given when it is to be read."""

    def __init__(self) -> None:
        self._part = io.BytesIO()

    def give(self, data: bytes) -> None:
        self._part = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._part.read(size)

    def readline(self) -> bytes:
        return self._part.readline()


class Pickle:
    """One file on its way: `load` it once, then ask what stood at places of its memo."""

    def __init__(
        self, file: IO[bytes], regular: Regular | None, progress: Progress = lambda read: None
    ) -> None:
        self._unpickler = _Plain(io.BufferedReader(_Opcodes(file, regular, progress), CHUNK // 4))
        self._questions: _Questions | None = None

    def load(self) -> Any:
        """Return its object. Raises pickle.UnpicklingError, or anything, for a broken file."""
        return self._unpickler.load()

    def remembered(self, places: Iterable[int]) -> list[Any]:
        """Return what the memo has at these places. Raises as `load` where there is nothing."""
        if self._questions is None:
            # Not the same one: more may stand in the file behind the end of its pickle.
            self._questions = _Questions()
            asked = _Plain(self._questions)
            asked.memo = self._unpickler.memo
            self._unpickler = asked
        gets = b"".join(b"j" + struct.pack("<I", place) for place in places)
        data = b"(" + gets + b"l."
        self._questions.give(b"\x80\x04\x95" + struct.pack("<Q", len(data)) + data)
        found: list[Any] = self._unpickler.load()
        return found
