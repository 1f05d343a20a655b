"""Runs of actions in a pickle's bytes, read as columns all at once and cut out of it.

Nearly all of a large snapshot are dicts of one and the same form: the same keys in the same order,
as references to what stands earlier in the file, with numbers and a list of frames. numpy reads a
thousand of them at a time, where Python's unpickler would make dicts of 300 bytes.

What is cut out leaves its places in the unpickler's memo filled (with the number of a stack where a
list of frames stood, with None elsewhere), so that all references behind it stay right; in its list
stands the number of the run. All else goes to the unpickler as it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

# Opcodes of protocol 4.
MEMOIZE, MARK, ITEMS, DICT, LIST, APPENDS, APPEND = b"\x94(u}]ea"
GET, LONG_GET, BYTE, WORD, INT, LONG, TUPLE = b"hjKMJ\x8a\x86"
BEGIN = bytes([DICT, MEMOIZE, MARK])

REF, NUMBER, PAIR, FRAMES = range(4)
"""Kinds of a value: a reference, a whole number, a pair of small numbers, a list of references."""
LEAST_FIELDS, MOST_FIELDS = 5, 30
FRAMES_LIMIT = 256
PAD = 16
"""Zeros behind the bytes, so that the last ones can be looked at as wide numbers."""
NO_FRAMES = -1
STACKS_LIMIT = 500_000
TAIL_LIMIT = 2**16
"""A dict with more bytes is not cut out where they do not come at once."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Form:
    """What the dicts have in common: for each field the opcode of its key, and its value's kind."""

    keys: tuple[bytes, ...]
    kinds: tuple[int, ...]


def learn(data: bytes, start: int) -> Form | None:
    """Return the form of the dict at `start`; None where it is no dict of such values."""
    keys: list[bytes] = []
    kinds: list[int] = []
    at = start + len(BEGIN)
    try:
        while data[at] != ITEMS:
            width = 2 if data[at] == GET else 5
            if data[at] not in (GET, LONG_GET) or len(keys) == MOST_FIELDS:
                return None
            keys.append(data[at : at + width])
            found = _value(data, at + width)
            if found is None:
                return None
            kind, at = found
            kinds.append(kind)
    except IndexError:
        return None
    if len(keys) < LEAST_FIELDS or kinds.count(FRAMES) != 1 or len(set(keys)) != len(keys):
        return None
    return Form(tuple(keys), tuple(kinds))


def _value(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the kind of a value and where it ends. Raises IndexError at the end of the bytes."""
    code = data[at]
    if code == BYTE and data[at + 2] == BYTE and data[at + 4] == TUPLE:
        return PAIR, at + 6
    if code in _WIDTHS:
        return (REF if code in (GET, LONG_GET) else NUMBER), at + _WIDTHS[code]
    if code == LONG:
        return NUMBER, at + 2 + data[at + 1]
    if code == LIST:
        places, end = list_at(data, at)
        return None if places is None else (FRAMES, end)
    return None


_WIDTHS = {GET: 2, LONG_GET: 5, BYTE: 2, WORD: 3, INT: 5}


def list_at(data: bytes, at: int) -> tuple[list[int] | None, int]:
    """Return the places in a list of references and where it ends; None for another list.

    Raises IndexError at the end of the bytes.
    """
    if data[at + 1] != MEMOIZE:
        return None, at
    many = data[at + 2] == MARK
    end = at + (3 if many else 2)
    places: list[int] = []
    while data[end] in (GET, LONG_GET) and len(places) <= FRAMES_LIMIT:
        if data[end] == GET:
            place, after = data[end + 1], end + 2
        else:
            place, after = int.from_bytes(data[end + 1 : end + 5], "little"), end + 5
        if not many and data[after] != APPEND:
            return [], end  # the list is empty; what follows is the next key
        places.append(place)
        end = after
        if not many:
            return places, end + 1
    if not many:
        return [], end
    return (places, end + 1) if data[end] == APPENDS else (None, at)


class Regular:
    """Cuts the runs out of one file's opcodes.

    A column holds for each dict that was cut out its value of one field. References are places in
    the memo. Frames are numbers of `stacks`, or −2 − place for a reference to a list that stands
    elsewhere. Pairs are left out.
    """

    def __init__(self) -> None:
        self.form: Form | None = None
        self.lengths: list[int] = []
        """Of each run its dicts."""
        self.stacks: list[list[int]] = []
        """Of each distinct list of frames the places in the memo."""
        self._parts: list[list[NDArray[Any]]] = []
        self._hashes: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._numbers: Ints = np.zeros(0, np.int64)

    def column(self, field: int) -> Ints:
        """Return a field of all runs, one after the other; it can be taken once."""
        parts, self._parts[field] = self._parts[field], []
        return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)

    def keep(self, columns: list[Ints | None], lengths: list[int]) -> None:
        """Add runs, with the columns of all of them together."""
        self.lengths += lengths
        if not self._parts:
            self._parts = [[] for _ in columns]
        for parts, column in zip(self._parts, columns, strict=True):
            if column is not None:
                parts.append(_small(column))

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
        entries = _Entries(buffer, starts, len(data), self)
        return entries.rest(data, tail), data[tail:]

    def number(self, hashes: NDArray[np.uint64], at: Ints, data: Bytes) -> Ints:
        """Return the numbers of lists by their hashes; a new one is read where it stands."""
        place = np.searchsorted(self._hashes, hashes)
        known = place < len(self._hashes)
        known[known] = self._hashes[place[known]] == hashes[known]
        if not known.all():
            fresh, first = np.unique(hashes[~known], return_index=True)
            whole = data.tobytes()
            for start in at[~known][first].tolist():
                places, _ = list_at(whole, start)
                self.stacks.append(places or [])
            self._hashes = np.concatenate([self._hashes, fresh])
            count = len(self._numbers)
            self._numbers = np.concatenate(
                [self._numbers, np.arange(count, count + len(fresh), dtype=np.int64)]
            )
            order = np.argsort(self._hashes)
            self._hashes, self._numbers = self._hashes[order], self._numbers[order]
            place = np.searchsorted(self._hashes, hashes)
        return self._numbers[place]

    def _learn(self, data: bytes) -> None:
        """Take the form of the first dict that has one, behind the first word "action"."""
        at = data.find(b"\x06action\x94")
        tries = 0
        while at >= 0 and tries < 200:
            at = data.find(BEGIN, at + 1)
            self.form = learn(data, at) if at >= 0 else None
            if self.form is not None:
                return
            tries += 1

    def _starts(self, buffer: Bytes) -> Ints:
        """Return where dicts begin whose first key is that of the form."""
        assert self.form is not None
        wanted = BEGIN + self.form.keys[0]
        end = len(buffer) - PAD
        found = np.flatnonzero((buffer[:end] == wanted[0]) & (buffer[1 : end + 1] == wanted[1]))
        for offset in range(2, len(wanted)):
            found = found[buffer[found + offset] == wanted[offset]]
        return found


class _Entries:
    """The dicts in some bytes, read in parallel: `at` is where each has been read up to."""

    def __init__(self, buffer: Bytes, starts: Ints, size: int, regular: Regular) -> None:
        form = regular.form
        assert form is not None
        self._buffer = buffer
        self._wide = np.ndarray((len(buffer) - 7,), "<i8", buffer, strides=(1,))
        self._size = size
        self._starts = starts
        self._at = starts + len(BEGIN)
        self._good = np.ones(len(starts), bool)
        self._regular = regular
        self._literal = np.zeros(len(starts), bool)
        self._columns: list[Ints | None] = []
        for key, kind in zip(form.keys, form.kinds, strict=True):
            self._expect(key)
            self._columns.append(self._read(kind))
        self._expect(bytes([ITEMS]))
        self._good &= self._at <= size

    def rest(self, data: bytes, tail: int) -> bytes:
        """Return the bytes up to `tail` with the runs cut out, which become the file's."""
        rows = np.flatnonzero(self._good & (self._at <= tail))
        if not len(rows):
            return data[:tail]
        breaks = np.flatnonzero(self._starts[rows[1:]] != self._at[rows[:-1]]) + 1
        parts: list[bytes] = []
        runs: list[int] = []
        done, number = 0, len(self._regular.lengths)
        fillers, lengths = self._fillers(rows)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            begin, end = int(self._starts[rows[first]]), int(self._at[rows[last - 1]])
            parts += [data[done:begin], fillers[ends[first] : ends[last]].tobytes()]
            parts.append(b"J" + struct.pack("<i", number + len(runs)))
            runs.append(last - first)
            done = end
        columns = [None if one is None else one[rows] for one in self._columns]
        self._regular.keep(columns, runs)
        return b"".join((*parts, data[done:tail]))

    def _fillers(self, rows: Ints) -> tuple[Bytes, Ints]:
        """Return opcodes that memoize as much as the dicts did, and their length for each."""
        form = self._regular.form
        assert form is not None
        frames = form.kinds.index(FRAMES)
        before = 1 + form.kinds[:frames].count(PAIR)
        after = form.kinds[frames:].count(PAIR)
        nothing = b"N" + b"\x94" * (before + after) + b"0"
        listed = b"N" + b"\x94" * before + b"0J\0\0\0\0\x940"
        hole = len(listed) - 6
        listed += b"N" + b"\x94" * after + b"0" if after else b""
        literal = self._literal[rows]
        lengths = np.where(literal, len(listed), len(nothing)).astype(np.int64)
        begin = np.cumsum(lengths) - lengths
        found = np.zeros(int(lengths.sum()), np.uint8)
        for mask, text in ((literal, listed), (~literal, nothing)):
            places = begin[mask][:, None] + np.arange(len(text))
            found[places] = np.frombuffer(text, np.uint8)
        numbers = self._columns[frames]
        assert numbers is not None
        octets = numbers[rows][literal].astype("<i4").view(np.uint8).reshape(-1, 4)
        found[begin[literal][:, None] + hole + np.arange(4)] = octets
        return found, lengths

    def _expect(self, wanted: bytes) -> None:
        """Read these bytes."""
        for offset, byte in enumerate(wanted):
            self._good &= self._byte(self._at + offset) == byte
        self._step(np.int64(len(wanted)))

    def _byte(self, at: Ints) -> Bytes:
        return self._buffer[at]

    def _step(self, width: Ints | np.int64) -> None:
        """Go on; one that is no good, or leaves the bytes, stays where it can be looked at."""
        self._at = np.minimum(self._at + np.where(self._good, width, 0), self._size)

    def _read(self, kind: int) -> Ints | None:
        code = self._byte(self._at)
        if kind == PAIR:
            self._good &= (code == BYTE) & (self._byte(self._at + 2) == BYTE)
            self._good &= self._byte(self._at + 4) == TUPLE
            self._good &= self._byte(self._at + 5) == MEMOIZE
            self._step(np.int64(6))
            return None
        if kind == FRAMES:
            return self._frames(code)
        if kind == REF:
            return self._reference(code)
        return self._whole(code)

    def _reference(self, code: Bytes) -> Ints:
        value = self._wide[self._at] >> 8
        near, far = code == GET, code == LONG_GET
        self._good &= near | far
        self._step(np.where(near, 2, 5))
        return np.where(near, value & 0xFF, value & 0xFFFFFFFF)

    def _whole(self, code: Bytes) -> Ints:
        word = self._wide[self._at]
        value = np.where(code == BYTE, (word >> 8) & 0xFF, (word >> 8) & 0xFFFF)
        width = np.where(code == BYTE, 2, 3)
        fine = (code == BYTE) | (code == WORD)
        is_int = code == INT
        if is_int.any():
            value = np.where(is_int, (word << 24) >> 32, value)
            width = np.where(is_int, 5, width)
            fine |= is_int
        is_long = code == LONG
        if is_long.any():
            length = (word >> 8) & 0xFF
            fine |= is_long & (length > 0) & (length <= 8)
            shift = 8 * (8 - np.clip(length, 1, 8))
            octets = self._wide[np.minimum(self._at + 2, len(self._wide) - 1)]
            value = np.where(is_long, (octets << shift) >> shift, value)
            width = np.where(is_long, 2 + length, width)
        self._good &= fine
        self._step(width)
        return value

    def _frames(self, code: Bytes) -> Ints:
        """Read a list of references, or a reference to a list."""
        literal = code == LIST
        value = self._wide[self._at] >> 8
        near, far = code == GET, code == LONG_GET
        self._good &= near | far | (literal & (self._byte(self._at + 1) == MEMOIZE))
        found = np.where(near, -2 - (value & 0xFF), -2 - (value & 0xFFFFFFFF))
        self._literal = literal & self._good
        lists = np.flatnonzero(self._literal)
        hashes, end, fine = self._hashed(self._at[lists])
        width = np.where(near, 2, 5)
        width[lists] = end - self._at[lists]
        self._good[lists[~fine]] = False
        fresh = lists[fine]
        if len(self._regular.stacks) >= STACKS_LIMIT:
            self._good[fresh] = False  # the unpickler reads them
        elif len(fresh):
            found[fresh] = self._regular.number(hashes[fine], self._at[fresh], self._buffer)
        self._literal &= self._good
        self._step(width)
        return found

    def _hashed(self, begin: Ints) -> tuple[NDArray[np.uint64], Ints, Flags]:
        """Return a hash of each list, where it ends, and whether it is one of references."""
        many = self._byte(begin + 2) == MARK
        at = begin + np.where(many, 3, 2)
        hashes = np.ones(len(begin), np.uint64)
        fine = np.zeros(len(begin), bool)
        # A list of one has no mark, and an empty one only what follows it.
        one = np.flatnonzero(~many)
        if len(one):
            word = self._wide[at[one]]
            near, far = (word & 0xFF) == GET, (word & 0xFF) == LONG_GET
            width = np.where(near, 2, 5)
            follows = self._byte(np.minimum(at[one] + width, self._size))
            single = (near | far) & (follows == APPEND)
            place = np.where(near, (word >> 8) & 0xFF, (word >> 8) & 0xFFFFFFFF)
            hashes[one] = np.where(single, _mixed(hashes[one], place), hashes[one])
            at[one] += np.where(single, width + 1, 0)
            fine[one] = True
        going = np.flatnonzero(many)
        for _ in range(FRAMES_LIMIT + 1):
            if not len(going):
                break
            word = self._wide[at[going]]
            code = word & 0xFF
            ended = going[code == APPENDS]
            at[ended] += 1
            fine[ended] = True
            near, far = code == GET, code == LONG_GET
            place = np.where(near, (word >> 8) & 0xFF, (word >> 8) & 0xFFFFFFFF)
            goes = near | far
            hashes[going] = np.where(goes, _mixed(hashes[going], place), hashes[going])
            at[going] += np.where(near, 2, np.where(far, 5, 0))
            going = going[goes & (at[going] < self._size)]
        return hashes, at, fine & (at <= self._size)


def _mixed(hashes: NDArray[np.uint64], place: Ints) -> NDArray[np.uint64]:
    mixed = (hashes ^ (place.astype(np.uint64) + np.uint64(1))) * _FACTOR
    return mixed ^ (mixed >> np.uint64(29))


def _small(column: Ints) -> NDArray[Any]:
    """Return the column in as few bytes as its numbers need: millions of them are kept."""
    low, high = int(column.min()), int(column.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return column.astype(kind)
    return column
