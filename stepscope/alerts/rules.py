"""Alert rules and alert instances; pure, no I/O.

An alert instance is the state of a rule for one GPU or process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class AlertLevel(StrEnum):
    """Severity of an alert, the lowest first."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class RuleCondition(StrEnum):
    """Result of one evaluation of a rule."""

    HOLDS = "holds"
    BETWEEN = "between"  # between the threshold and the value that clears the alert
    OVER = "over"
    UNKNOWN = "unknown"  # no value, or the rule does not apply at present


class AlertState(StrEnum):
    """Change that an alert reports."""

    RAISED = "raised"
    CLEARED = "cleared"


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule; those with an empty `metric` get their values from `evaluator.py`.

    It is over once the metric is back at `clear`, by default the threshold. `text` may have
    {value}, {threshold}, {metric}, {device}, {seconds} and {step}.
    """

    name: str
    metric: Annotated[str, Meta(min_length=1, max_length=500)] = ""
    above: Number | None = None
    below: Number | None = None
    not_finite: bool = False
    clear: Number | None = None
    for_s: Seconds = 0.0
    clear_s: Seconds = 10.0
    level: AlertLevel = AlertLevel.WARNING
    text: Annotated[str, Meta(min_length=1, max_length=300)] = ""
    enabled: bool = True

    @property
    def threshold(self) -> float | None:
        """The value of `above` or `below`."""
        return self.above if self.below is None else self.below


def condition_of(rule: AlertRule, values: Sequence[float]) -> RuleCondition:
    """Return the condition for the values since the last evaluation, newest last.

    A rule without `for_s` holds if any value is bad; other rules hold only if all values are.
    """
    if rule.not_finite and values:
        is_bad = not all(map(math.isfinite, values))
        holds = is_bad and (rule.for_s == 0 or not math.isfinite(values[-1]))
        return RuleCondition.HOLDS if holds else RuleCondition.OVER
    sign = 1 if rule.below is None else -1
    known = [sign * value for value in values if not math.isnan(value)]
    if not known:
        return RuleCondition.UNKNOWN
    threshold = sign * (rule.threshold or 0.0)
    clear = threshold if rule.clear is None else min(threshold, sign * rule.clear)
    if (max(known) if rule.for_s == 0 else min(known)) > threshold:
        return RuleCondition.HOLDS
    return RuleCondition.OVER if max(known) <= clear else RuleCondition.BETWEEN


@dataclass(slots=True)
class AlertInstance:
    """State of one rule for one GPU or process."""

    for_s: float
    clear_s: float
    raised: bool = False
    raised_at: float = 0.0
    _since: float | None = None

    def update(self, now: float, condition: RuleCondition) -> AlertState | None:
        """Return the change at `now` (s); any unexpected condition restarts the waiting time."""
        expected = RuleCondition.OVER if self.raised else RuleCondition.HOLDS
        if condition is not expected:
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
        above=95,
        clear=90,
        clear_s=30,
        text="{device} is about to run out of memory: {value} is in use, and allocations were "
        "retried after the cache was emptied",
    ),
    AlertRule(
        name=THROTTLING,
        for_s=5,
        clear_s=30,
        text="{device}: clocks lowered by {value} for {seconds}",
    ),
    AlertRule(
        name=LOSS,
        not_finite=True,
        level=AlertLevel.CRITICAL,
        text="{metric} is {value} at step {step}",
    ),
    AlertRule(
        name=NO_STEP,
        for_s=60,
        clear_s=0,
        level=AlertLevel.CRITICAL,
        text="No step for {value}: the last was step {step}",
    ),
    AlertRule(
        name=GPU_IDLE,
        below=5,
        for_s=60,
        text="{device} is idle: utilization below {threshold} for {seconds}, while the run trains "
        "on it",
    ),
    AlertRule(name=GPU_LOST, clear_s=30, level=AlertLevel.CRITICAL, text="{device}: {value}"),
    AlertRule(name=RUN_FAILED, level=AlertLevel.CRITICAL, text="The run failed: {value}"),
    AlertRule(
        name=RUN_FINISHED,
        level=AlertLevel.INFO,
        text="The run finished after step {step}",
        enabled=False,
    ),
)
"""The rules without a file; `evaluator.py` computes their values."""

ENDINGS = (RUN_FAILED, RUN_FINISHED)  # evaluated once, at the end of the run
