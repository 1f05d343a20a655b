"""Conditions of alert rules, and their texts. Pure, no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.alerts.settings import AlertRule, AlertState
from stepscope.common.formatting import format_bytes
from stepscope.common.metrics import BY_KEY, Unit


def holds(rule: AlertRule, values: Sequence[float]) -> bool | None:
    """Return True if a rule holds for the values since the last evaluation, newest last.

    A rule without `for_s` holds if any value is bad; other rules hold only if all values are.
    Returns None without a value.
    """
    if rule.not_finite and values:
        is_bad = not all(map(math.isfinite, values))
        return is_bad and (rule.for_s == 0 or not math.isfinite(values[-1]))
    sign = 1 if rule.below is None else -1
    known = [sign * value for value in values if not math.isnan(value)]
    if not known:
        return None
    worst = max(known) if rule.for_s == 0 else min(known)
    return worst > sign * (rule.threshold or 0.0)


@dataclass(slots=True)
class AlertInstance:
    """State of a rule for one source: "" for the process, a GPU's UUID, the key of a loss."""

    for_s: float
    clear_s: float
    raised: bool = False
    raised_at: float = 0.0
    text: str = ""  # of the alert that was raised
    _since: float | None = None

    def update(self, now: float, is_bad: bool | None) -> AlertState | None:
        """Return the change at `now` (s); None and the present state restart the waiting time."""
        if is_bad is None or is_bad == self.raised:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < (self.clear_s if self.raised else self.for_s):
            return None
        self.raised = not self.raised
        self._since = None
        if self.raised:
            self.raised_at = now
        return AlertState.RAISED if self.raised else AlertState.CLEARED


def is_loss(key: str) -> bool:
    """Return True if the default rules watch this metric of a step."""
    return key in ("train/loss", "val/loss") or key.startswith("train/loss.")


def with_unit(metric: str, value: float) -> str:
    """Return a value with the unit of its metric."""
    unit = BY_KEY[metric].unit if metric in BY_KEY else Unit.NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if unit is Unit.BYTES:
        return format_bytes(value)
    if unit in (Unit.NONE, Unit.COUNT, Unit.MASK):
        return f"{value:.4g}"
    return f"{value:.4g}{unit}" if unit is Unit.PERCENT else f"{value:.4g} {unit}"


def fill(text: str, fields: Mapping[str, str]) -> str:
    """Replace the fields in one pass; unknown braces are kept."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)
