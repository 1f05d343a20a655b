"""Numbers and texts as people read them; pure."""

from __future__ import annotations

import re

# What a terminal obeys and does not show: colors, cursor moves, window titles.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def format_bytes(size: float) -> str:
    """Bytes in the largest binary unit that keeps the number above 1: "2.10 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units: "59 s", "2 min 05 s", "3 h 20 min"."""
    if seconds is None:
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def printable(text: str) -> str:
    """Return the text without control characters: a shared folder is written by others."""
    return "".join(char if char.isprintable() else "�" for char in text)


def terminal_text(text: str) -> str:
    """Return what stays on a terminal after this text: progress bars rewrite their line."""
    lines = _ESCAPES.sub("", text.replace("\r\n", "\n")).split("\n")
    kept = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return "\n".join(_CONTROLS.sub("", line) for line in kept)
