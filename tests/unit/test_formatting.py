"""Numbers as people read them; `test_doctest.py` runs the examples in the docstrings."""

from __future__ import annotations

import math

import pytest

from stepscope.common.formatting import format_bytes, format_duration


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (15 * 2**30, "15.0 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-(2**20), "-1.00 MiB"),
        (None, "n/a"),
    ],
)
def test_bytes_in_binary_units(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0 s"),
        (61, "1 min 01 s"),
        (7260, "2 h 01 min"),
        (90000, "1 d 01 h"),
        (None, "?"),
        (math.inf, "?"),
        (-math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
