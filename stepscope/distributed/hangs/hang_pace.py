"""How long a rank has made no step, and whether that is far longer than usual; pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WARM_STEPS = 5
"""Steps after which a run is warm: the first ones compile and allocate."""
USUAL_STEPS = 10.0
"""Usual steps without a step from which on a rank hangs."""
LEAST_S = 5.0
"""Shortest time without a step that is a hang."""
PATIENCE = 1.5
"""A wait may take this many times the longest one so far that ended by itself, as that for a
checkpoint does."""
LOOKS = 30
"""Looks with a step from which the usual step is worked out."""


@dataclass(slots=True)
class Pace:
    """Counts steps at looks about a second apart; times in seconds of one clock."""

    longest_s: float = 0.0
    since: float | None = None
    """When a step, or another sign of work, was seen last; None before the first look."""
    _step: int = 0
    _sign: int = 0
    _seen: int = 0
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))

    @property
    def usual_s(self) -> float | None:
        """The usual time of a step; None before the run is warm."""
        return median(self._times) if self._times and self._seen >= WARM_STEPS else None

    @property
    def limit_s(self) -> float | None:
        """The time without a step from which on it is a hang; None before the run is warm."""
        usual_s = self.usual_s
        if usual_s is None:
            return None
        return max(LEAST_S, USUAL_STEPS * usual_s, PATIENCE * self.longest_s)

    def moved(self, now: float, ago_s: float, *, waited: bool) -> None:
        """Take in a sign of work that was found late: a collective was entered `ago_s` ago.

        `waited` says that it ended a wait. Otherwise nobody looked before, and what came in between
        is not known: a long validation must not count as one long wait.
        """
        if self.since is None:
            return
        at = max(self.since, now - max(0.0, ago_s))
        if waited:
            self.longest_s = max(self.longest_s, at - self.since)
        self.since = at

    def look(self, now: float, step: int, *, due: bool, sign: int = 0) -> float | None:
        """Return the seconds without a step where they are a hang, otherwise None.

        `due`: the run trains, and nothing of ours holds it up. `sign` rises with work that is no
        step.
        """
        if self.since is None or not due:
            self.since, self._step, self._sign = now, step, sign
            return None
        waited_s, steps = now - self.since, step - self._step
        if steps > 0:
            self._times.append(waited_s / steps)
            self._seen += steps
        if steps != 0 or sign != self._sign:
            if self._seen > WARM_STEPS + steps and waited_s >= LEAST_S:
                self.longest_s = max(self.longest_s, waited_s)
            self.since, self._step, self._sign = now, step, sign
            return None
        limit_s = self.limit_s
        return waited_s if limit_s is not None and waited_s >= limit_s else None
