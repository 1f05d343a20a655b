"""Epoch seconds that neither jump nor fall: wall time at the start plus elapsed boot time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable


def _elapsed() -> Callable[[], float]:
    try:
        time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):  # not Linux
        return time.monotonic
    return functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # no Python frame a call


MIN_OFFSET_S = 1.0  # what NTP sets a clock by in smaller steps changes no age of a heartbeat

elapsed = _elapsed()  # seconds since the system's start


class Clock:
    """The time of one process; `elapsed() + offset` is `now()` where a call is too slow."""

    __slots__ = ("offset",)

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Take over the wall time: before a run's first timestamp only."""
        self.offset = time.time() - elapsed()

    def now(self) -> float:
        """Return the epoch seconds of this process."""
        return elapsed() + self.offset

    def wall_offset(self) -> float:
        """Return the seconds by which the wall clock was set; 0 below MIN_OFFSET_S."""
        offset_s = time.time() - self.now()
        return offset_s if abs(offset_s) >= MIN_OFFSET_S else 0.0


clock = Clock()
