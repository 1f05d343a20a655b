"""The one form that nearly all dicts of a history have in a pickle's opcodes; pure."""

from __future__ import annotations

from dataclasses import dataclass

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
