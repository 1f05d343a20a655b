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
        self._last: tuple[float, float | None, float | None] | None = None
        self._counted: tuple[float, float] | None = None  # joules, seconds
        self._estimated: tuple[float, float] | None = None

    def add(self, now: float, counter: float | None, power: float | None) -> None:
        """Take a reading at `now` (s): the counter in J, the power in W, None where not given."""
        if self._last is not None:
            before, last_counter, last_power = self._last
            passed = now - before
            if counter is not None and last_counter is not None and counter >= last_counter:
                self._counted = _plus(self._counted, counter - last_counter, passed)
            if power is not None and last_power is not None and passed <= LONGEST_GAP_S:
                self._estimated = _plus(self._estimated, passed * (power + last_power) / 2, passed)
        self._last = now, counter, power

    def energy(self) -> Energy | None:
        """Return what was taken so far; None before two readings."""
        if self._counted is not None:
            return Energy(*self._counted, from_counter=True)
        return None if self._estimated is None else Energy(*self._estimated, from_counter=False)


def _plus(so_far: tuple[float, float] | None, joules: float, seconds: float) -> tuple[float, float]:
    before = so_far or (0.0, 0.0)
    return before[0] + joules, before[1] + seconds
