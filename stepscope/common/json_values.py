"""Turns any value of a script into what a file can hold: no function here raises."""

from __future__ import annotations

import json
from typing import Any

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
