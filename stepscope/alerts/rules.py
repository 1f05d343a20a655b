"""Rules and alarms; pure.

A rule says when something is wrong. An alarm is its state for one GPU or process: it is raised once
the rule has held for a while, and cleared once the opposite has held for a while, so that a value
that swings around a threshold does not raise it again and again.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is; `rank` orders them."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for the least."""
        return list(Severity).index(self)


class Comparison(StrEnum):
    """What a value must be for the rule to hold, as alerts.toml names it."""

    ABOVE = "above"
    BELOW = "below"
    NOT_FINITE = "not_finite"


class RuleMatch(StrEnum):
    """What one look says of a rule."""

    HOLDS = "holds"
    BETWEEN = "between"
    """No longer bad, and not yet good enough to be over."""
    OVER = "over"
    UNKNOWN = "unknown"
    """There is no value, or the rule does not apply now."""


class AlertState(StrEnum):
    """What an alert says, as its event has it."""

    RAISED = "raised"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """One rule; a `metric` of "" marks those of `evaluator.py`.

    It holds while the metric is above or below `threshold` (or not finite) and is over once it is
    back at `clear` or better. It must hold for `for_s` to be raised, and be over for `clear_s` to
    be cleared. In `text` {value}, {threshold}, {metric}, {device}, {seconds} and {step} are filled.
    """

    name: str
    metric: str = ""
    comparison: Comparison = Comparison.ABOVE
    threshold: float = math.nan
    clear: float = math.nan
    for_s: float = 0.0
    clear_s: float = 10.0
    level: Severity = Severity.WARNING
    text: str = ""
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class WindowStats:
    """What was seen of a metric since the last look.

    `low` and `high` are None where all values were NaN; `last` is the newest value, whatever it is.
    `odd` is the first one that was NaN or infinite, `odd_step` the step it came with. `bits` are
    those that were set in any of the values, where they are masks.
    """

    low: float | None
    high: float | None
    last: float
    odd: float | None = None
    odd_step: int | None = None
    bits: int = field(default=0, compare=False)

    @classmethod
    def of(cls, value: float, step: int | None) -> WindowStats:
        """Return the span of one value."""
        known = None if math.isnan(value) else value
        if math.isfinite(value):
            return cls(known, known, value, bits=_bits(value))
        return cls(known, known, value, value, step)

    @classmethod
    def of_all(cls, values: Sequence[float]) -> WindowStats:
        """Return the span of some values, at least one, of which nobody knows the steps."""
        if math.isfinite(sum(values)):  # the way of nearly all of them
            bits = functools.reduce(operator.or_, map(_bits, set(values)))
            return cls(min(values), max(values), values[-1], bits=bits)
        return functools.reduce(cls.then, [cls.of(value, None) for value in values])

    def then(self, later: WindowStats) -> WindowStats:
        """Return both in one."""
        lows = [low for low in (self.low, later.low) if low is not None]
        highs = [high for high in (self.high, later.high) if high is not None]
        odd = self if self.odd is not None else later
        return WindowStats(
            min(lows, default=None),
            max(highs, default=None),
            later.last,
            odd.odd,
            odd.odd_step,
            self.bits | later.bits,
        )

    def held(self) -> WindowStats:
        """Return what is still so where no newer value has come: the newest one."""
        return WindowStats.of(self.last, self.odd_step)


def _bits(value: float) -> int:
    """Return the bits of a mask; 0 for what is none."""
    return int(value) if 0 <= value < 2**63 else 0


def condition_of(rule: AlertRule, span: WindowStats | None) -> RuleMatch:
    """Say what the values since the last look mean for a rule over a metric.

    A rule without `for_s` holds if a single value was bad; others only if all were.
    """
    if span is None:
        return RuleMatch.UNKNOWN
    if rule.comparison is Comparison.NOT_FINITE:
        bad = span.odd is not None and (rule.for_s == 0 or not math.isfinite(span.last))
        return RuleMatch.HOLDS if bad else RuleMatch.OVER
    if span.low is None or span.high is None:
        return RuleMatch.UNKNOWN
    low, high, threshold, clear = span.low, span.high, rule.threshold, rule.clear
    if rule.comparison is Comparison.BELOW:
        low, high, threshold, clear = -high, -low, -threshold, -clear
    if (high if rule.for_s == 0 else low) > threshold:
        return RuleMatch.HOLDS
    is_over = high <= (threshold if math.isnan(clear) else clear)
    return RuleMatch.OVER if is_over else RuleMatch.BETWEEN


@dataclass(slots=True)
class AlertInstance:
    """The state of one rule for one GPU or process."""

    for_s: float
    clear_s: float
    raised: bool = False
    raised_at: float = 0.0
    _since: float | None = None

    def judge(self, now: float, condition: RuleMatch) -> AlertState | None:
        """Return what has changed by `now` (s); None for nothing.

        A look that says anything else, or does not know, begins the time that is waited anew.
        """
        wanted = RuleMatch.OVER if self.raised else RuleMatch.HOLDS
        if condition is not wanted:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < (self.clear_s if self.raised else self.for_s):
            return None
        self.raised, self._since = not self.raised, None
        if self.raised:
            self.raised_at = now
        return AlertState.RAISED if self.raised else AlertState.CLEARED


MEMORY_FULL, THROTTLING, LOSS, NO_STEP = "memory_full", "throttling", "loss_not_finite", "no_step"
GPU_IDLE, GPU_LOST, RUN_FAILED, RUN_FINISHED = "gpu_idle", "gpu_lost", "run_failed", "run_finished"

DEFAULTS: tuple[AlertRule, ...] = (
    AlertRule(
        name=MEMORY_FULL,
        threshold=95,
        clear=90,
        clear_s=30,
        text="{device}: {value} of the memory is in use, and allocations had to be tried again "
        "after the cache was emptied: it is about to run out",
    ),
    AlertRule(
        name=THROTTLING,
        for_s=5,
        clear_s=30,
        text="{device}: clocks lowered by {value} for {seconds}",
    ),
    AlertRule(
        name=LOSS,
        comparison=Comparison.NOT_FINITE,
        level=Severity.CRITICAL,
        text="{metric} is {value} at step {step}",
    ),
    AlertRule(
        name=NO_STEP,
        for_s=60,
        clear_s=0,
        level=Severity.CRITICAL,
        text="No step for {value}: the last was step {step}",
    ),
    AlertRule(
        name=GPU_IDLE,
        comparison=Comparison.BELOW,
        threshold=5,
        clear=5,
        for_s=60,
        text="{device} is idle: utilization below {threshold} for {seconds}, while the run trains "
        "on it",
    ),
    AlertRule(name=GPU_LOST, clear_s=30, level=Severity.CRITICAL, text="{device}: {value}"),
    AlertRule(name=RUN_FAILED, level=Severity.CRITICAL, text="The run failed: {value}"),
    AlertRule(
        name=RUN_FINISHED,
        level=Severity.INFO,
        text="The run finished after step {step}",
        enabled=False,
    ),
)
"""What is watched without a file; `evaluator.py` says when each of them holds."""

ENDINGS = (RUN_FAILED, RUN_FINISHED)
"""Judged once, at the end of the run."""
