"""The energy that a GPU takes while it is looked at; pure."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_GAP_S = 3.0
"""Time between two readings of the power over which it is taken to have changed evenly."""


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules over `seconds` in which they were counted; `from_counter` is False for an estimate.

    The driver's counter is exact over gaps. An estimate is the integral of the power readings.
    """

    joules: float
    seconds: float
    from_counter: bool


class EnergyMeter:
    """Adds readings up; a counter that falls has begun again (the driver was loaded anew)."""

    def __init__(self) -> None:
        self._counter: tuple[float, float] | None = None  # the last known one, and its time
        self._power: tuple[float, float] | None = None
        self._counted: tuple[float, float] | None = None  # joules, seconds
        self._estimated: tuple[float, float] | None = None

    def add(self, now: float, counter: float | None, power: float | None) -> None:
        """Take a reading at `now` (s): the counter in J, the power in W, None where not given."""
        if counter is not None:
            self._count(now, counter)
        if power is not None:
            self._estimate(now, power)

    def _count(self, now: float, counter: float) -> None:
        last, self._counter = self._counter, (now, counter)
        if last is not None and counter >= last[1]:
            self._counted = _plus(self._counted, counter - last[1], now - last[0])

    def _estimate(self, now: float, power: float) -> None:
        last, self._power = self._power, (now, power)
        if last is not None and now - last[0] <= LONGEST_GAP_S:
            passed = now - last[0]
            self._estimated = _plus(self._estimated, passed * (power + last[1]) / 2, passed)

    def energy(self) -> Energy | None:
        """Return what was taken so far; None before two readings."""
        if self._counted is not None:
            return Energy(*self._counted, from_counter=True)
        return None if self._estimated is None else Energy(*self._estimated, from_counter=False)


def _plus(so_far: tuple[float, float] | None, joules: float, seconds: float) -> tuple[float, float]:
    before = so_far or (0.0, 0.0)
    return before[0] + joules, before[1] + seconds
