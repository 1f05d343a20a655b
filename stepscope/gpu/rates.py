"""Bytes a second from counters that wrap or start again."""

from __future__ import annotations

from dataclasses import dataclass

WRAP = 2**32
"""PCIe's byte counters "can be wrapped" (nvml.h): some count in 32 bits."""
UNWATCHED_S = 0.25
"""A 32-bit counter that is looked at less often may have wrapped twice: at 34 GB/s it does."""
FASTEST = 2e12
"""B/s that no link reaches: NVLink 5 has 0.9e12 each way."""

ONE_READING = "needs two readings"
MAY_HAVE_WRAPPED = "the counter may wrap between readings this far apart"


def counted(before: int, after: int) -> int | None:
    """Return what a counter counted between two readings; None where it has begun anew.

    A counter that falls while below 2^32 has wrapped there; a larger one was reset.
    """
    if after >= before:
        return after - before
    return after + WRAP - before if before < WRAP else None


@dataclass(slots=True)
class Rate:
    """The mean rate of one counter between two calls of `take`, over the time that really passed.

    `wraps` says that the counter may be one of 32 bits.
    """

    wraps: bool = True
    reason: str | None = ONE_READING
    _last: tuple[float, int] | None = None
    _counted: int = 0
    _seconds: float = 0.0
    _unknown_s: float = 0.0

    @property
    def wide(self) -> bool:
        """Whether the counter has shown that it has more than 32 bits."""
        return self._last is not None and self._last[1] >= WRAP

    def add(self, now: float, counter: int) -> None:
        """Take a reading of the counter at `now` (s)."""
        last, self._last = self._last, (now, counter)
        if last is None or now <= last[0]:
            return
        seconds, before = now - last[0], last[1]
        more = self._between(before, counter, seconds)
        if more is None:
            self._unknown_s += seconds
        else:
            self._counted += more
            self._seconds += seconds

    def begin(self) -> None:
        """Let the next rate be of the time from the latest reading on, whatever was before."""
        self._counted, self._seconds, self._unknown_s = 0, 0.0, 0.0

    def take(self) -> float | None:
        """Return bytes a second since the last call or `begin`; None, with `reason`, if not known.

        It is not known where most of that time is not: the rest may have been another.
        """
        counted, seconds, unknown_s = self._counted, self._seconds, self._unknown_s
        self._counted, self._seconds, self._unknown_s = 0, 0.0, 0.0
        if seconds <= 0 or seconds < unknown_s:
            return None
        self.reason = None
        return float(round(counted / seconds))

    def _between(self, before: int, after: int, seconds: float) -> int | None:
        """Return the counts of one interval, if they can be told."""
        if not self.wraps:
            more = after - before if after >= before else None
        elif max(before, after) < WRAP and seconds > UNWATCHED_S:
            self.reason = MAY_HAVE_WRAPPED
            return None
        else:
            more = counted(before, after)
        if more is None or more > FASTEST * seconds:
            return None
        return more
