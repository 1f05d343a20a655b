"""A pickle of plain containers, read without calling anything that it names.

Python's unpickler in C with every way to a class or a function refused. What is left can still ask
for more memory than there is: a foreign file belongs into a process with limits
(`stepscope.snapshots.write`).
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import IO, Any, NoReturn

LOOK_BYTES = 2**18
"""Read between two looks at what has been made: so much is still in the processor's cache."""
BATCH = 1000
"""Items that a pickle adds to a list at a time; a list is empty until the first of them are."""
EMPTY_LIMIT = 10_000
"""Lists that are still empty, of which one may become a wanted one."""

Progress = Callable[[int], None]
"""Called with the bytes read so far."""


class _Plain(pickle.Unpickler):
    """Refuses classes, functions and persistent objects."""

    def find_class(self, module: str, name: str) -> NoReturn:
        what = f"{module}.{name}"[:100]
        raise pickle.UnpicklingError(f"it names {what!r}, and only plain containers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


class _Tapped:
    """A file as an unpickler reads it: frame by frame of 64 KB; `look` is called in between."""

    def __init__(self, file: IO[bytes], look: Callable[[], None], progress: Progress) -> None:
        self._read = file.read
        self._look = look
        self._progress = progress
        self._bytes = 0
        self._next = LOOK_BYTES
        self.readline = file.readline
        self.readinto = file.readinto  # type: ignore[attr-defined]
        self.peek = file.peek  # type: ignore[attr-defined]

    def read(self, size: int = -1) -> bytes:
        """Read, and look where enough was read since."""
        data = self._read(size)
        self._bytes += len(data)
        if self._bytes >= self._next:
            self._next = self._bytes + LOOK_BYTES
            self._progress(self._bytes)
            self._look()
        return data


class NewLists:
    """Finds the lists that an unpickler is filling, by what the garbage collector has newly seen.

    Only for a process of its own: garbage is not collected there any more.
    """

    def __init__(self, wanted: Callable[[list[Any]], bool]) -> None:
        self._wanted = wanted
        self._empty: list[list[Any]] = []
        self._length = 0
        self.found: list[list[Any]] = []
        gc.disable()
        gc.freeze()

    def look(self) -> list[list[Any]]:
        """Return all wanted lists so far that have a batch or more, in the order of their begin."""
        made = [
            one
            for one in gc.get_objects(generation=0)
            if type(one) is list and not 0 < len(one) < BATCH
        ]
        gc.freeze()
        waiting, self._empty = self._empty, []
        grows = self._grows()
        for one in made if grows else [*waiting, *made]:
            if not one:
                self._empty.append(one)
            elif self._wanted(one):
                self.found.append(one)
        del self._empty[:-EMPTY_LIMIT]
        return self.found

    def _grows(self) -> bool:
        """Say whether the newest list has grown since the last look: then none has followed it
        that was seen empty before."""
        length = len(self.found[-1]) if self.found else 0
        grown, self._length = length > self._length, length
        return grown


def unpickle(
    file: IO[bytes],
    *,
    look: Callable[[], None] = lambda: None,
    progress: Progress = lambda read: None,
) -> Any:
    """Return the object of a pickle.

    Raises pickle.UnpicklingError or whatever else the unpickler meets in a broken file.
    """
    return _Plain(_Tapped(file, look, progress)).load()
