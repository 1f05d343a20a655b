"""Why a GPU lowers its clocks, in words."""

from __future__ import annotations

_ALARMING = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons (nvml.h)."""


def throttle_words(mask: int) -> list[str]:
    """Name the alarming bits of `gpu/throttle_reasons`.

    An idle GPU, a power cap at full load and clocks that somebody has set are normal.
    """
    return [word for bit, word in _ALARMING.items() if mask & bit]
