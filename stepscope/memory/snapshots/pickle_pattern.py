"""The one form that nearly all dicts of a history have in a pickle's opcodes; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Opcodes of protocol 4.
MEMOIZE, MARK, ITEMS, DICT, LIST, APPENDS, APPEND = b"\x94(u}]ea"
GET, LONG_GET, BYTE, WORD, INT, LONG, TUPLE, SHORT_TEXT = b"hjKMJ\x8a\x86\x8c"
BEGIN = bytes([DICT, MEMOIZE, MARK])

TEXT, NUMBER, PAIR, FRAMES = range(4)
"""Kinds of a value: a short text or a reference to one, a whole number, a pair of small numbers, a
list of references or a reference to one."""
LEAST_FIELDS, MOST_FIELDS = 5, 30
FRAMES_LIMIT = 256


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
        return (TEXT if code in (GET, LONG_GET) else NUMBER), at + _WIDTHS[code]
    if code == SHORT_TEXT:
        end = at + 2 + data[at + 1]
        return (TEXT, end + 1) if data[end] == MEMOIZE else None
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


Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
Numbers = Callable[[Hashes, Ints], Ints]
"""Returns the numbers of lists or texts, by their hashes and where they stand; −1: too many."""

TEXT_LIMIT = 64
"""Bytes of a text; the unpickler reads longer ones."""

PAD = 16
"""Zeros behind the bytes, so that the last ones can be looked at as wide numbers."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Entries:
    """The dicts in some bytes, read in parallel: `at` is where each has been read up to."""

    def __init__(
        self, buffer: Bytes, starts: Ints, form: Form, lists: Numbers, texts: Numbers
    ) -> None:
        self.starts = starts
        self.at = starts + len(BEGIN)
        self.good = np.ones(len(starts), bool)
        """Those that have the form so far."""
        self._buffer = buffer
        self._wide = np.ndarray((len(buffer) - 7,), "<i8", buffer, strides=(1,))
        self._size = len(buffer) - PAD
        self._lists = lists
        self._texts = texts
        self.columns: list[Ints | None] = []
        for key, kind in zip(form.keys, form.kinds, strict=True):
            self._expect(key)
            self.columns.append(self._read(kind))
        self._expect(bytes([ITEMS]))

    def _expect(self, wanted: bytes) -> None:
        """Read these bytes."""
        for offset, byte in enumerate(wanted):
            self.good &= self._byte(self.at + offset) == byte
        self._step(np.int64(len(wanted)))

    def _byte(self, at: Ints) -> Bytes:
        return self._buffer[at]

    def _step(self, width: Ints | np.int64) -> None:
        """Go on; one that is no good, or leaves the bytes, stays where it can be looked at."""
        self.at = np.minimum(self.at + np.where(self.good, width, 0), self._size)

    def _read(self, kind: int) -> Ints | None:
        code = self._byte(self.at)
        if kind == PAIR:
            self.good &= (code == BYTE) & (self._byte(self.at + 2) == BYTE)
            self.good &= self._byte(self.at + 4) == TUPLE
            self.good &= self._byte(self.at + 5) == MEMOIZE
            self._step(np.int64(6))
            return None
        if kind == FRAMES:
            return self._frames(code)
        if kind == TEXT:
            return self._text(code)
        return self._whole(code)

    def _reference(self, code: Bytes) -> tuple[Flags, Ints, Ints]:
        """Return which ones have a reference here, −2 − its place, and its width."""
        value = self._wide[self.at] >> 8
        near = code == GET
        found = np.where(near, -2 - (value & 0xFF), -2 - (value & 0xFFFFFFFF))
        return near | (code == LONG_GET), found, np.where(near, 2, 5)

    def _text(self, code: Bytes) -> Ints:
        """Read a text, or a reference to one."""
        refers, found, width = self._reference(code)
        self.good &= refers | (code == SHORT_TEXT)
        texts = np.flatnonzero(self.good & ~refers)
        if len(texts):
            at = self.at[texts]
            length = self._byte(at + 1).astype(np.int64)
            end = np.minimum(at + 2 + length, self._size)
            fine = (length <= TEXT_LIMIT) & (self._byte(end) == MEMOIZE)
            self.good[texts[~fine]] = False
            texts, at, length = texts[fine], at[fine], length[fine]
            found[texts] = self._texts(self._hashed_text(at + 2, length), at)
            self.good[texts] &= found[texts] >= 0
            width[texts] = 3 + length
        self._step(width)
        return found

    def _hashed_text(self, at: Ints, length: Ints) -> Hashes:
        hashes = length.astype(np.uint64)
        for offset in range(0, int(length.max(initial=0)), 8):
            left = np.clip(length - offset, 0, 8)
            word = self._wide[np.minimum(at + offset, len(self._wide) - 1)].astype(np.uint64)
            # A shift by all 64 bits would leave the word as it is.
            kept = np.where(left > 0, word << (8 * (8 - np.maximum(left, 1))).astype(np.uint64), 0)
            hashes = np.where(left > 0, _mixed(hashes, kept.astype(np.int64)), hashes)
        return hashes

    def _whole(self, code: Bytes) -> Ints:
        word = self._wide[self.at]
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
            octets = self._wide[np.minimum(self.at + 2, len(self._wide) - 1)]
            value = np.where(is_long, (octets << shift) >> shift, value)
            width = np.where(is_long, 2 + length, width)
        self.good &= fine
        self._step(width)
        return value

    def _frames(self, code: Bytes) -> Ints:
        """Read a list of references, or a reference to a list."""
        refers, found, width = self._reference(code)
        literal = (code == LIST) & (self._byte(self.at + 1) == MEMOIZE)
        self.good &= refers | literal
        lists = np.flatnonzero(literal & self.good)
        hashes, end, fine = self._hashed(self.at[lists])
        width[lists] = end - self.at[lists]
        self.good[lists[~fine]] = False
        fresh = lists[fine]
        if len(fresh):
            found[fresh] = self._lists(hashes[fine], self.at[fresh])
            self.good[fresh] &= found[fresh] >= 0  # the others are too many
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
