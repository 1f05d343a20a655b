"""Convert values to JSON without raising, and check values parsed from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import summary_line

TEXT_LIMIT = 1000  # maximum number of characters of a value that JSON cannot represent
LINE_LIMIT = 200
MAX_DEPTH = 4  # levels of nested objects whose entries have names with dots


def to_json(value: Any) -> Any:
    """Return a copy of a value as JSON; the text of a value that JSON cannot represent."""
    try:
        text = json.dumps(value, default=str, skipkeys=True)
        return json.loads(text, parse_constant=str)  # the page's JSON has no NaN
    except Exception:  # noqa: BLE001 - a cycle, changed by another thread, the script's own methods
        return to_text(value)[:TEXT_LIMIT]


def to_text(value: Any) -> str:
    """Return a value's text in valid Unicode; file names may contain lone surrogates."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - of the script's own method
        return f"<{type(value).__name__}>"


def flattened(values: Mapping[str, Any], prefix: str = "", depth: int = 1) -> dict[str, Any]:
    """Return the entries of an object and of nested ones, up to MAX_DEPTH, by names with dots.

    >>> flattened({"lr": 0.1, "model": {"depth": 12}})
    {'lr': 0.1, 'model.depth': 12}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            found |= flattened(value, f"{prefix}{name}.", depth + 1)
        else:
            found[f"{prefix}{name}"] = value
    return found


def dict_of(value: Any) -> dict[str, Any]:
    """Return a value that is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def first_line(error: BaseException) -> str:
    """Return an error's first line, and the next ones while it ends with a colon."""
    return summary_line(to_text(error))[:LINE_LIMIT] or type(error).__name__


MAX_JSON_VALUES = 1_000_000  # 60 MB of Python objects; commas in texts count as well
MAX_JSON_DEPTH = 50  # `repr` and `json.dumps` recurse, from deep call stacks
# Long integers, which overflow in a division, become floats.
_DECODER = json.JSONDecoder(parse_int=lambda n: int(n) if len(n) < 20 else float(n))


def parse_json(text: str) -> Any:
    """Return the value of an untrusted JSON text.

    Its texts can be encoded as UTF-8, its ints converted to float. Raises ValueError for a text
    that is invalid, deeper than MAX_JSON_DEPTH, or of more than MAX_JSON_VALUES values.
    """
    if sum(map(text.count, ",[{")) > MAX_JSON_VALUES:
        raise ValueError(f"must have at most {MAX_JSON_VALUES:,} values, got more")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _is_deeper(value, MAX_JSON_DEPTH):
        raise ValueError(f"must have at most {MAX_JSON_DEPTH} levels, got more")
    if "\\ud" in text or "\\uD" in text:  # one half of a surrogate pair cannot be encoded
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if a JSON value has more than this many levels."""
    parents = [value] if type(value) in (dict, list) else []
    while parents and levels:
        levels -= 1
        parents = [
            child
            for parent in parents
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in (dict, list)
        ]
    return bool(parents)
