"""When the default rules hold that need more than one number; pure, but for what they remember.

Each abstains where it cannot know: a value that is missing is not a low one, and a run that is
paused, profiled or not yet past its first steps owes nobody a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.alerts.rules import Condition, Rule, Span
from stepscope.gpu.throttling import throttle_words

RETRIED_S = 60.0
"""How long a retry of an allocation counts."""
WARM_STEPS = 3
"""Changes of the step after which a run is warm: the first steps compile and allocate."""
PATIENCE = 2.0
"""A step may take this many times the longest wait so far before it counts as stuck."""


@dataclass(slots=True)
class Retries:
    """When the allocator's count of retries rose last."""

    _count: float | None = None
    _rose_at: float | None = None

    def look(self, now: float, count: float | None) -> bool | None:
        """Say whether an allocation was retried lately; None where nobody counts."""
        if count is not None:
            if self._count is not None and count > self._count:
                self._rose_at = now
            self._count = count
        if self._count is None:
            return None
        return self._rose_at is not None and now - self._rose_at < RETRIED_S


def memory_condition(rule: Rule, share: Span | None, retried: bool | None) -> Condition:
    """Judge the used share of a device's memory (%), together with retries of allocations."""
    if share is None or share.low is None or share.high is None or retried is None:
        return Condition.UNKNOWN
    if not retried or share.high <= rule.clear:
        return Condition.OVER
    return Condition.HOLDS if share.high > rule.threshold else Condition.BETWEEN


def throttling_condition(mask: Span | None) -> tuple[Condition, str]:
    """Judge `gpu/throttle_reasons`; return the thermal reasons in words as well.

    Any sample of the span counts: a driver that lowers clocks by heat lets the bit flicker.
    """
    if mask is None or not 0 <= mask.last < 2**63:
        return Condition.UNKNOWN, ""
    words = [word for word in throttle_words(mask.bits) if "thermal" in word]
    return (Condition.HOLDS if words else Condition.OVER), ", ".join(words)


@dataclass(slots=True)
class StepClock:
    """How long a run has been without a step while one was due.

    Some trainings validate for minutes without a word of it. So the longest wait that ended by
    itself is remembered, and only what is PATIENCE times as long is a standstill.
    """

    changes: int = 0
    """How often another step was seen."""
    longest_s: float = 0.0
    _step: int | None = None
    _sign: int = 0
    _since: float = 0.0
    _whole: bool = False
    """A step was due all the time since `_since`."""

    @property
    def is_warm(self) -> bool:
        """Say whether the run is past its first steps."""
        return self.changes >= WARM_STEPS

    def look(self, now: float, step: int, *, due: bool, sign: int) -> float | None:
        """Return the seconds without a step, None where none is due.

        `sign` is a number that moves with other work of the training, such as validation.
        """
        moved = self._step is not None and step != self._step
        if moved:
            if self.is_warm and self._whole:
                self.longest_s = max(self.longest_s, now - self._since)
            self.changes += 1
        if self._step is None or moved or sign != self._sign or not due:
            self._since, self._whole = now, moved and due
        self._step, self._sign = step, sign
        return now - self._since if due and self.is_warm else None

    def condition(self, rule: Rule, silent_s: float | None) -> Condition:
        """Judge the seconds without a step."""
        if silent_s is None:
            return Condition.UNKNOWN
        is_stuck = silent_s >= max(rule.for_s, PATIENCE * self.longest_s)
        return Condition.HOLDS if is_stuck else Condition.OVER
