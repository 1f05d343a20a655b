"""Format numbers and texts for people."""

from __future__ import annotations

import math
import re

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Sequences that control a terminal: colors, cursor moves, window titles.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def format_bytes(size: float | None) -> str:
    """Return bytes in a binary unit with three digits.

    >>> format_bytes(2_254_857_830), format_bytes(1024**2 - 1), format_bytes(None)
    ('2.10 GiB', '1.00 MiB', 'n/a')
    """
    if size is None:
        return "n/a"
    for unit in _BYTE_UNITS:
        if round(abs(size)) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        size /= 1024
    digits = 0 if unit == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {unit}"


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units, "?" if unknown.

    >>> format_duration(125), format_duration(12_000)
    ('2 min 05 s', '3 h 20 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = int(seconds)
    for size, unit, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02} {part}"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"


def format_short_time(seconds: float) -> str:
    """Return a short time in µs, ms or s with three digits.

    >>> format_short_time(8.1e-6), format_short_time(0.0670033), format_short_time(1.5)
    ('8.10 µs', '67.0 ms', '1.50 s')
    """
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:  # from here on it is rounded to 1,000
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds)} s"


def three_digits(value: float) -> str:
    """Return a number with three significant digits or more, without exponent.

    >>> three_digits(12_345), three_digits(9.996), three_digits(0.0125), three_digits(0)
    ('12,345', '10.0', '0.0125', '0')
    """
    rounded = float(f"{value:.2e}")
    digits = 0 if rounded == 0 else max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{digits}f}"


def format_energy(joules: float) -> str:
    """Return an energy in joules, and in watt-hours, with three digits each.

    >>> format_energy(812), format_energy(12_345_678)
    ('812 J (0.226 Wh)', '12.3 MJ (3,429 Wh)')
    """
    return f"{_with_prefix(joules, 'J')} ({three_digits(joules / 3600)} Wh)"


def format_flop(operations: float) -> str:
    """Return a number of floating-point operations with three digits.

    >>> format_flop(68_124_672), format_flop(1_163_567_038_464)
    ('68.1 MFLOP', '1.16 TFLOP')
    """
    return _with_prefix(operations, "FLOP")


def _with_prefix(value: float, unit: str) -> str:
    prefix = ""
    for larger in ("k", "M", "G", "T", "P"):
        if abs(value) < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{three_digits(value)} {prefix}{unit}"


def number_name(value: float) -> str:
    """Return the JavaScript name of a non-finite number."""
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def summary_line(text: str) -> str:
    """Return the first line, and the next ones while it ends with a colon.

    >>> summary_line("Error in loading Net:\\n\\tMissing key: a.\\n\\tUnexpected key: b.")
    'Error in loading Net: Missing key: a.'
    """
    found = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        found = f"{found} {line}".lstrip()
        if not line.endswith(":"):
            break
    return found


def printable(text: str) -> str:
    """Replace control characters in untrusted text."""
    return "".join(char if char.isprintable() else "�" for char in text)


def terminal_text(text: str) -> str:
    """Return the text as a terminal shows it: progress bars overwrite their line."""
    lines = _ESCAPES.sub("", text.replace("\r\n", "\n")).split("\n")
    kept = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return "\n".join(_CONTROLS.sub("", line) for line in kept)
