"""What a script hands over, made fit for files and messages: nothing here raises, ever."""

from __future__ import annotations

import json
from typing import Any

TEXT_LIMIT = 1000
"""Characters kept of what JSON cannot hold."""
BRIEF_LIMIT = 200


def plain(value: Any) -> Any:
    """Return what JSON keeps of a value, whatever it is; later changes to the value do not show."""
    try:
        text = json.dumps(value, default=str, skipkeys=True)
        return json.loads(text, parse_constant=str)  # the page's JSON has no word for NaN
    except Exception:  # noqa: BLE001 - a cycle, changed by another thread, the script's own methods
        return clean(value)[:TEXT_LIMIT]


def clean(text: Any) -> str:
    """Return a text that any file can hold: names of files may bring half characters."""
    try:
        return str(text).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - of the script's own method
        return f"<{type(text).__name__}>"


def brief(error: BaseException) -> str:
    """Return an error's first line: the rest of what CUDA says is advice to who writes kernels."""
    first = clean(error).strip().partition("\n")[0]
    return first[:BRIEF_LIMIT] or type(error).__name__
