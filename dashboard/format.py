"""Numbers as words for the page; the live component formats its own in the browser."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(value: float | None) -> str:
    """Return bytes in binary units with one decimal, "n/a" for None; 0 is "0 B"."""
    if value is None:
        return "n/a"
    size = float(value)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def escape_markdown(text: str) -> str:
    """Return a text of others for a place that reads Markdown: nothing in it is a mark."""
    return re.sub(r"([\\`*_\[\]<>$:~#|!])", r"\\\1", text)
