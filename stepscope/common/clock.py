"""Monotonic epoch seconds: wall time at the start plus elapsed boot time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

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


clock = Clock()
