"""Convert values to JSON without raising, and check values parsed from JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

TEXT_LIMIT = 1000
"""Characters kept of what JSON cannot hold."""
LINE_LIMIT = 200


def to_json(value: Any) -> Any:
    """Return a copy of what JSON can hold of a value; of another value its text."""
    try:
        text = json.dumps(value, default=str, skipkeys=True)
        return json.loads(text, parse_constant=str)  # the page's JSON has no word for NaN
    except Exception:  # noqa: BLE001 - a cycle, changed by another thread, the script's own methods
        return to_text(value)[:TEXT_LIMIT]


def to_text(value: Any) -> str:
    """Return a value's text in valid Unicode; file names may contain lone surrogates."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - of the script's own method
        return f"<{type(value).__name__}>"


def first_line(error: BaseException) -> str:
    """Return an error's first line; the others, of CUDA's, are advice for writers of kernels."""
    line = to_text(error).strip().partition("\n")[0]
    return line[:LINE_LIMIT] or type(error).__name__


MAX_TEXT = 2000
"""Characters of one text."""
LIST_LIMIT = 2000
"""Entries of one list."""
PLAIN = frozenset((int, float, bool, str))
"""Types of values that hold no other values."""


def parsed(kind: Any, text: str | bytes, schema: int, where: str) -> Any:
    """Return a dataclass from the text of a file of a schema. Raises ValueError for another one."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON ({str(error)[:80]})") from None
    if not isinstance(told, dict) or told.get("schema") != schema:
        raise ValueError(f"must be an object of schema {schema}")
    return object_of(kind, told, where)


def object_of(kind: Any, told: Any, where: str) -> Any:
    """Return a dataclass from its JSON form; entries that a newer version has are left out.

    Raises ValueError, which names the field under `where`, for what has another form.
    """
    if not isinstance(told, dict):
        raise ValueError(f"{where}: must be an object, got {_shown(told)}")
    hints = _hints(kind)
    given = {
        name: _value(hints[name], told[name], f"{where}.{name}") for name in hints & told.keys()
    }
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields: 0.1 ms a look, and a file has a hundred objects."""
    return get_type_hints(kind)


def _value(kind: Any, told: Any, where: str) -> Any:
    """Return a value of a field's type."""
    if kind in PLAIN:  # first: most values are numbers in lists
        return _plain(kind, told, where)
    if get_origin(kind) in (types.UnionType, typing.Union):
        if told is None and type(None) in get_args(kind):
            return None
        return _value(get_args(kind)[0], told, where)
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], one, where) for one in _list(told, where))
    if get_origin(kind) is dict:
        if not isinstance(told, dict) or len(told) > LIST_LIMIT:
            raise ValueError(f"{where}: must be an object, got {_shown(told)}")
        of = get_args(kind)[1]
        return {str(key)[:MAX_TEXT]: _value(of, one, where) for key, one in told.items()}
    if dataclasses.is_dataclass(kind):
        return object_of(kind, told, where)
    return _plain(kind, told, where)


def _plain(kind: Any, told: Any, where: str) -> Any:
    if type(told) is int and abs(told) >= 2**63:
        raise ValueError(f"{where}: must be a number of 64 bits, got a larger one")
    if kind is float and type(told) in (int, float) and math.isfinite(told):
        return float(told)
    if kind is int and type(told) is int:
        return told
    if kind is bool and type(told) is bool:
        return told
    if kind is str and isinstance(told, str):
        return told[:MAX_TEXT]
    if issubclass(kind, StrEnum) and told in list(kind):
        return kind(told)
    raise ValueError(f"{where}: must be of type {kind.__name__}, got {_shown(told)}")


def _list(told: Any, where: str) -> list[Any]:
    if not isinstance(told, list | tuple) or len(told) > LIST_LIMIT:
        raise ValueError(f"{where}: must be a list of at most {LIST_LIMIT}, got {_shown(told)}")
    return list(told)


def _shown(told: Any) -> str:
    return (
        repr(told)[:60]
        if isinstance(told, str | int | float | bool | None)
        else type(told).__name__
    )
