"""Runs of actions in a pickle's bytes, read as columns all at once and cut out of it.

Nearly all of a large snapshot are dicts of one and the same form: the same keys in the same order,
as references to what stands earlier in the file, with numbers and a list of frames. numpy reads a
thousand of them at a time, where Python's unpickler would make dicts of 300 bytes.

What is cut out leaves its places in the unpickler's memo filled (with the number of a stack where a
list of frames stood, with None elsewhere), so that all references behind it stay right; in its list
stands the number of the run. All else goes to the unpickler as it is.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from stepscope.memory.snapshots.pickle_pattern import (
    BEGIN,
    FRAMES,
    PAD,
    PAIR,
    TEXT,
    Bytes,
    Entries,
    Flags,
    Form,
    Hashes,
    Ints,
    learn,
    list_at,
)

STACKS_LIMIT = 500_000
"""Distinct lists of frames; the unpickler reads those beyond."""
TEXTS_LIMIT = 250
"""Distinct texts: a number below 256 is an object that Python has already."""
TAIL_LIMIT = 2**16
"""A dict with more bytes is not cut out where they do not come at once."""
TRIES = 200
"""Dicts of which one may show the form, in each part of the file."""


class Regular:
    """Cuts the runs out of one file's opcodes.

    A column holds for each dict that was cut out its value of one field. Of texts and frames it has
    numbers of `texts` and `stacks`, or −2 − place in the memo for a reference to what stands
    elsewhere. Pairs are left out.
    """

    def __init__(self) -> None:
        self.form: Form | None = None
        self.lengths: list[int] = []
        """Of each run its dicts."""
        self.stacks: list[list[int]] = []
        """Of each distinct list of frames the places in the memo."""
        self.texts: list[str] = []
        self._lists = _Distinct(self._add_list, STACKS_LIMIT)
        self._texts = _Distinct(self._add_text, TEXTS_LIMIT)
        self._begun = False
        self._parts: list[list[NDArray[Any]]] = []

    def column(self, field: int) -> Ints:
        """Return a field of all runs, one after the other; it can be taken once."""
        parts, self._parts[field] = self._parts[field], []
        return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)

    def cut(self, data: bytes, *, last: bool) -> tuple[bytes, bytes]:
        """Return the opcodes for the unpickler, and the end that needs the next bytes to be read.

        With `last` no more bytes follow.
        """
        if self.form is None:
            self._learn(data)
        if self.form is None:
            return data, b""
        buffer = np.frombuffer(data + bytes(PAD), np.uint8)
        starts = self._starts(buffer)
        tail = len(data)
        if not last and len(starts) and tail - int(starts[-1]) < TAIL_LIMIT:
            tail = int(starts[-1])  # it may go on behind the end
            starts = starts[:-1]
        lists = functools.partial(self._lists.numbers, data=data)
        texts = functools.partial(self._texts.numbers, data=data)
        entries = Entries(buffer, starts, self.form, lists, texts)
        return self._without_runs(entries, data, tail), data[tail:]

    def _without_runs(self, entries: Entries, data: bytes, tail: int) -> bytes:
        """Return the bytes up to `tail` with the runs cut out, whose columns are kept."""
        rows = np.flatnonzero(entries.good & (entries.at <= tail))
        if not len(rows):
            return data[:tail]
        breaks = np.flatnonzero(entries.starts[rows[1:]] != entries.at[rows[:-1]]) + 1
        fillers, lengths = self._fillers(entries, rows)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        parts: list[bytes] = []
        done = 0
        for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            parts.append(data[done : int(entries.starts[rows[first]])])
            parts.append(fillers[ends[first] : ends[last]].tobytes())
            parts.append(b"J" + struct.pack("<i", len(self.lengths)))
            self.lengths.append(last - first)
            done = int(entries.at[rows[last - 1]])
        self._keep(None if one is None else one[rows] for one in entries.columns)
        return b"".join((*parts, data[done:tail]))

    def _fillers(self, entries: Entries, rows: Ints) -> tuple[Bytes, Ints]:
        """Return opcodes that memoize as much as the dicts did, and their length for each.

        There are few kinds of them: by which texts they have, and whether a list of frames.
        """
        assert self.form is not None
        frames = self.form.kinds.index(FRAMES)
        stacks = _of(entries, frames)[rows]
        texts = [place for place, kind in enumerate(self.form.kinds) if kind == TEXT]
        kind = (stacks >= 0).astype(np.int64)
        for place in texts:
            text = np.maximum(-1, _of(entries, place)[rows]) + 1
            ranks = np.cumsum(np.bincount(text) > 0) - 1
            kind = kind * (ranks[-1] + 1) + ranks[text]
        counts = np.bincount(kind)
        which = (np.cumsum(counts > 0) - 1)[kind]
        first = np.array([np.argmax(kind == one) for one in np.flatnonzero(counts)])
        made = [self._filler(entries, int(rows[one]), stacks[one] >= 0) for one in first.tolist()]
        lengths = np.array([len(filler) for filler, _ in made], np.int64)[which]
        begin = np.cumsum(lengths) - lengths
        found = np.zeros(int(lengths.sum()), np.uint8)
        for number, (filler, hole) in enumerate(made):
            mine = which == number
            found[begin[mine][:, None] + np.arange(len(filler))] = np.frombuffer(filler, np.uint8)
            if hole:
                octets = stacks[mine].astype("<i4").view(np.uint8).reshape(-1, 4)
                found[begin[mine][:, None] + hole + np.arange(4)] = octets
        return found, lengths

    def _filler(self, entries: Entries, row: int, listed: bool) -> tuple[bytes, int]:
        """Return the opcodes in place of a dict, and where in them the number of its stack goes.

        A number stands for a text and for a list of frames, for a pair whatever is there.
        """
        assert self.form is not None
        filler, hole = b"N\x94", 0
        for place, kind in enumerate(self.form.kinds):
            if kind == PAIR:
                filler += b"\x94"
            elif kind == TEXT and _of(entries, place)[row] >= 0:
                filler += b"0K" + bytes([_of(entries, place)[row]]) + b"\x94"
            elif kind == FRAMES and listed:
                hole = len(filler) + 2
                filler += b"0J\0\0\0\0\x94"
        return filler + b"0", hole

    def _keep(self, columns: Iterable[Ints | None]) -> None:
        """Add the columns of new runs, all of them together."""
        found = list(columns)
        self._parts = self._parts or [[] for _ in found]
        for parts, column in zip(self._parts, found, strict=True):
            if column is not None:
                parts.append(_small(column))

    def _add_list(self, data: bytes, at: int) -> None:
        self.stacks.append(list_at(data, at)[0] or [])

    def _add_text(self, data: bytes, at: int) -> None:
        text = data[at + 2 : at + 2 + data[at + 1]]
        self.texts.append(text.decode(errors="replace"))

    def _learn(self, data: bytes) -> None:
        """Take the form of the first dict that has one, behind the first word "action"."""
        at = 0 if self._begun else data.find(b"\x06action\x94")
        self._begun = at >= 0
        for _ in range(TRIES):
            at = data.find(BEGIN, at + 1) if at >= 0 else -1
            if at < 0 or self.form is not None:
                return
            self.form = learn(data, at)

    def _starts(self, buffer: Bytes) -> Ints:
        """Return where dicts begin whose first key is that of the form."""
        assert self.form is not None
        wanted = BEGIN + self.form.keys[0]
        end = len(buffer) - PAD
        found = np.flatnonzero((buffer[:end] == wanted[0]) & (buffer[1 : end + 1] == wanted[1]))
        for offset in range(2, len(wanted)):
            found = found[buffer[found + offset] == wanted[offset]]
        return found


class _Distinct:
    """Gives numbers to what stands in the bytes, by a hash of it, from 0 up to a limit."""

    def __init__(self, add: Callable[[bytes, int], None], limit: int) -> None:
        self._add = add
        self._limit = limit
        self._hashes: Hashes = np.zeros(0, np.uint64)
        self._numbers: Ints = np.zeros(0, np.int64)

    def numbers(self, hashes: Hashes, at: Ints, data: bytes) -> Ints:
        """Return the numbers by hashes; −1 for those that are too many.

        A new one is read where it stands.
        """
        known, place = self._known(hashes)
        if not known.all():
            fresh, first = np.unique(hashes[~known], return_index=True)
            room, count = self._limit - len(self._hashes), len(self._hashes)
            for start in at[~known][first[:room]].tolist():
                self._add(data, start)
            numbers = np.arange(count, count + len(fresh[:room]), dtype=np.int64)
            hashes_now = np.concatenate([self._hashes, fresh[:room]])
            order = np.argsort(hashes_now)
            self._hashes = hashes_now[order]
            self._numbers = np.concatenate([self._numbers, numbers])[order]
            known, place = self._known(hashes)
        return np.where(known, self._numbers[place], -1)

    def _known(self, hashes: Hashes) -> tuple[Flags, Ints]:
        """Return which ones have a number, and where in `_hashes` they are."""
        if not len(self._hashes):
            return np.zeros(len(hashes), bool), np.zeros(len(hashes), np.int64)
        place = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return self._hashes[place] == hashes, place


def _of(entries: Entries, field: int) -> Ints:
    """Return a column that is there: of every kind but pairs."""
    column = entries.columns[field]
    assert column is not None
    return column


def _small(column: Ints) -> NDArray[Any]:
    """Return the column in as few bytes as its numbers need: millions of them are kept."""
    low, high = int(column.min()), int(column.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return column.astype(kind)
    return column


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
