"""Numbers as people read them; `test_doctest.py` runs the examples in the docstrings."""

from __future__ import annotations

import math

import pytest

from stepscope.common.formatting import format_bytes, format_duration


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *((format_bytes(size), f"{size} B") for size in (0, 1023)),
        (format_bytes(5000 * 2**40), "5000 TiB"),
        (format_bytes(-(2**20)), "-1.00 MiB"),
        (format_duration(90000), "1 d 01 h"),
        *((format_duration(seconds), "?") for seconds in (None, math.inf, -math.inf, math.nan)),
    ],
)
def test_limits_of_numbers(text: str, wanted: str) -> None:
    assert text == wanted
