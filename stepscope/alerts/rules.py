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


class Level(StrEnum):
    """How bad it is; `rank` orders them."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for the least."""
        return list(Level).index(self)


class Comparison(StrEnum):
    """What a value must be for the rule to hold, as alerts.toml names it."""

    ABOVE = "above"
    BELOW = "below"
    NOT_FINITE = "not_finite"


class Condition(StrEnum):
    """What one look says of a rule."""

    HOLDS = "holds"
    BETWEEN = "between"
    """No longer bad, and not yet good enough to be over."""
    OVER = "over"
    UNKNOWN = "unknown"
    """There is no value, or the rule does not apply now."""


class State(StrEnum):
    """What an alert says, as its event has it."""

    RAISED = "raised"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
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
    level: Level = Level.WARNING
    text: str = ""
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Span:
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
    def of(cls, value: float, step: int | None) -> Span:
        """Return the span of one value."""
        known = None if math.isnan(value) else value
        if math.isfinite(value):
            return cls(known, known, value, bits=_bits(value))
        return cls(known, known, value, value, step)

    @classmethod
    def of_all(cls, values: Sequence[float]) -> Span:
        """Return the span of some values, at least one, of which nobody knows the steps."""
        if math.isfinite(sum(values)):  # the way of nearly all of them
            bits = functools.reduce(operator.or_, map(_bits, set(values)))
            return cls(min(values), max(values), values[-1], bits=bits)
        return functools.reduce(cls.then, [cls.of(value, None) for value in values])

    def then(self, later: Span) -> Span:
        """Return both in one."""
        lows = [low for low in (self.low, later.low) if low is not None]
        highs = [high for high in (self.high, later.high) if high is not None]
        odd = self if self.odd is not None else later
        return Span(
            min(lows, default=None),
            max(highs, default=None),
            later.last,
            odd.odd,
            odd.odd_step,
            self.bits | later.bits,
        )

    def held(self) -> Span:
        """Return what is still so where no newer value has come: the newest one."""
        return Span.of(self.last, self.odd_step)


def _bits(value: float) -> int:
    """Return the bits of a mask; 0 for what is none."""
    return int(value) if 0 <= value < 2**63 else 0


def condition_of(rule: Rule, span: Span | None) -> Condition:
    """Say what the values since the last look mean for a rule over a metric.

    A rule without `for_s` holds if a single value was bad; others only if all were.
    """
    if span is None:
        return Condition.UNKNOWN
    if rule.comparison is Comparison.NOT_FINITE:
        bad = span.odd is not None and (rule.for_s == 0 or not math.isfinite(span.last))
        return Condition.HOLDS if bad else Condition.OVER
    if span.low is None or span.high is None:
        return Condition.UNKNOWN
    low, high, threshold, clear = span.low, span.high, rule.threshold, rule.clear
    if rule.comparison is Comparison.BELOW:
        low, high, threshold, clear = -high, -low, -threshold, -clear
    if (high if rule.for_s == 0 else low) > threshold:
        return Condition.HOLDS
    is_over = high <= (threshold if math.isnan(clear) else clear)
    return Condition.OVER if is_over else Condition.BETWEEN


@dataclass(slots=True)
class Alarm:
    """The state of one rule for one GPU or process."""

    for_s: float
    clear_s: float
    raised: bool = False
    raised_at: float = 0.0
    _since: float | None = None

    def judge(self, now: float, condition: Condition) -> State | None:
        """Return what has changed by `now` (s); None for nothing.

        A look that says anything else, or does not know, begins the time that is waited anew.
        """
        wanted = Condition.OVER if self.raised else Condition.HOLDS
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
        return State.RAISED if self.raised else State.CLEARED


MEMORY_FULL, THROTTLING, LOSS, NO_STEP = "memory_full", "throttling", "loss_not_finite", "no_step"
GPU_IDLE, GPU_LOST, RUN_FAILED, RUN_FINISHED = "gpu_idle", "gpu_lost", "run_failed", "run_finished"

DEFAULTS: tuple[Rule, ...] = (
    Rule(
        name=MEMORY_FULL,
        threshold=95,
        clear=90,
        clear_s=30,
        text="{device}: {value} of the memory is in use, and allocations had to be tried again "
        "after the cache was emptied: it is about to run out",
    ),
    Rule(
        name=THROTTLING,
        for_s=5,
        clear_s=30,
        text="{device}: clocks lowered by {value} for {seconds}",
    ),
    Rule(
        name=LOSS,
        comparison=Comparison.NOT_FINITE,
        level=Level.CRITICAL,
        text="{metric} is {value} at step {step}",
    ),
    Rule(
        name=NO_STEP,
        for_s=60,
        clear_s=0,
        level=Level.CRITICAL,
        text="No step for {value}: the last was step {step}",
    ),
    Rule(
        name=GPU_IDLE,
        comparison=Comparison.BELOW,
        threshold=5,
        clear=5,
        for_s=60,
        text="{device} is idle: utilization below {threshold} for {seconds}, while the run trains "
        "on it",
    ),
    Rule(name=GPU_LOST, clear_s=30, level=Level.CRITICAL, text="{device}: {value}"),
    Rule(name=RUN_FAILED, level=Level.CRITICAL, text="The run failed: {value}"),
    Rule(
        name=RUN_FINISHED,
        level=Level.INFO,
        text="The run finished after step {step}",
        enabled=False,
    ),
)
"""What is watched without a file; `evaluator.py` says when each of them holds."""

ENDINGS = (RUN_FAILED, RUN_FINISHED)
"""Judged once, at the end of the run."""
