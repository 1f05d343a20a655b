"""Monotonic epoch seconds: wall time at the start plus elapsed boot time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

MIN_OFFSET_S = 1.0  # smaller corrections, such as NTP's, do not affect the age of a heartbeat

elapsed: Callable[[], float] = time.monotonic  # Returns the seconds since the system's start.
with contextlib.suppress(OSError):  # refused in some sandboxes
    time.clock_gettime(time.CLOCK_BOOTTIME)
    elapsed = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # no Python frame


class Clock:
    """Clock of one process; inline `elapsed() + offset` where a call of `now` is too slow."""

    __slots__ = ("offset",)

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Adopt the wall time; only before a run's first timestamp."""
        self.offset = time.time() - elapsed()

    def now(self) -> float:
        """Return the epoch seconds of this process."""
        return elapsed() + self.offset

    def wall_offset(self) -> float:
        """Return the seconds by which the wall clock was set, or 0 below MIN_OFFSET_S."""
        offset_s = time.time() - self.now()
        return offset_s if abs(offset_s) >= MIN_OFFSET_S else 0.0


clock = Clock()
