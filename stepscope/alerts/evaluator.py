"""Evaluate all alert rules once a second; pure, no I/O.

An alert instance is the state of a rule for one source: "" for the process, the UUID of a GPU, the
key of a loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from operator import or_

from stepscope.alerts import settings as named
from stepscope.alerts.settings import AlertRule, AlertState
from stepscope.common.formatting import format_bytes, format_duration
from stepscope.common.stall_detector import StepGap
from stepscope.gpu.device_events import throttle_words
from stepscope.metrics import BY_KEY, Stream, Unit

RETRIED_S = 60.0  # time for which a retried allocation counts
LOSSES = ("train/loss", "val/loss")


class RuleCondition(StrEnum):
    """Result of one evaluation of a rule."""

    HOLDS = "holds"
    BETWEEN = "between"  # between the threshold and the value that clears the alert
    OVER = "over"
    UNKNOWN = "unknown"  # no value, or the rule does not apply at present


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFacts:
    """Input of one evaluation.

    `values`: since the last evaluation, by source and metric, newest last; `odd_steps`: step of the
    first non-finite value. `lost`: reason by UUID of each lost GPU; `labels`: names of GPUs.
    `trains_on`: GPUs of all processes of the run; `own`: the GPU of this process; `own_total`: its
    memory in bytes, used without NVML. `gap`: the time without a step, None unless one is due.
    """

    now: float
    step: int = 0
    gap: StepGap | None = None
    values: Mapping[tuple[str, str], Sequence[float]] = field(default_factory=dict)
    odd_steps: Mapping[tuple[str, str], int] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    trains_on: frozenset[str] = frozenset()
    own: str | None = None
    own_total: float | None = None

    def label(self, source: str) -> str:
        """Return the name of a GPU, or "The process"."""
        return self.labels.get(source, source) or "The process"

    def of_metric(self, metric: str) -> Iterator[tuple[str, Sequence[float]]]:
        """Yield source and values of a metric."""
        return ((source, found) for (source, key), found in self.values.items() if key == metric)


@dataclass(frozen=True, slots=True)
class AlarmChange:
    """An alert instance that was raised or cleared; `value` is the measured number, if any."""

    rule: AlertRule
    state: AlertState
    source: str
    text: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of a rule for one source; `value`, `shown` and `metric` are for its text."""

    source: str
    values: Sequence[float]
    value: float | None = None
    shown: str = ""
    metric: str = ""
    step: int | None = None


class AlertEvaluator:
    """Alert instances of one process's run. Not thread-safe."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = [rule for rule in rules if rule.enabled and rule.name not in named.ENDINGS]
        self._alarms: dict[tuple[str, str], AlertInstance] = {}
        self._retries: float | None = None
        self._retried_at = -math.inf
        self._special: dict[str, Callable[[AlertFacts], Iterable[Reading]]] = {
            named.MEMORY_FULL: self._memory,
            named.THROTTLING: self._throttling,
            named.LOSS: self._losses,
            named.NO_STEP: self._steps,
            named.GPU_IDLE: self._idle,
            named.GPU_LOST: self._lost,
        }

    def evaluate(self, facts: AlertFacts) -> list[AlarmChange]:
        """Return the alert instances that changed; call it about once a second."""
        changes = []
        for rule in self._rules:
            readings = (
                _read_metric(facts, rule.metric, not_finite=rule.not_finite)
                if rule.metric
                else self._special[rule.name](facts)
            )
            changes += [change for one in readings if (change := self._update(rule, one, facts))]
        return changes

    def _update(self, rule: AlertRule, reading: Reading, facts: AlertFacts) -> AlarmChange | None:
        source = reading.source
        alarm = self._alarms.get((rule.name, source))
        if alarm is None:
            for_s = 0.0 if rule.name == named.NO_STEP else rule.for_s  # The gap is that long.
            alarm = self._alarms[rule.name, source] = AlertInstance(for_s, rule.clear_s)
        state = alarm.update(facts.now, condition_of(rule, reading.values))
        if state is None:
            return None
        text = _text(rule, reading, facts)
        if state is AlertState.CLEARED:
            lasted = format_duration(facts.now - alarm.raised_at)
            about = facts.label(source) if source else reading.metric
            text = f"{title(rule.name)}{f' ({about})' if about else ''}: cleared after {lasted}"
        return AlarmChange(rule, state, source, text, reading.value)

    def _memory(self, facts: AlertFacts) -> Iterator[Reading]:
        """Yield the used memory in percent, or 0 if no allocation was retried."""
        values, own = facts.values, facts.own
        retries = values.get(("", "memory/alloc_retries"))
        if retries:
            if self._retries is not None and retries[-1] > self._retries:
                self._retried_at = facts.now
            self._retries = retries[-1]
        if own is None:
            return
        # NVML counts all processes; without NVML only this process's cache is known.
        used = values.get((own, "gpu/mem_used")) or values.get(("", "memory/reserved"))
        total = values.get((own, "gpu/mem_total"), (facts.own_total or 0.0,))[-1]
        if not used or not total or self._retries is None:
            yield Reading(own, ())
            return
        percent = [100 * value / total for value in used]
        retried = facts.now - self._retried_at < RETRIED_S
        yield Reading(own, percent if retried else (0.0,), percent[-1], f"{percent[-1]:.0f}%")

    def _throttling(self, facts: AlertFacts) -> Iterator[Reading]:
        """Yield 1 for a GPU with a thermal reason in any sample: the bit may flicker."""
        for uuid, masks in facts.of_metric("gpu/throttle_reasons"):
            if uuid not in facts.trains_on:
                continue
            known = [int(mask) for mask in masks if 0 <= mask < 2**63]
            words = [word for word in throttle_words(reduce(or_, known, 0)) if "thermal" in word]
            values = (float(bool(words)),) if known else ()
            yield Reading(uuid, values, masks[-1], ", ".join(words))

    def _losses(self, facts: AlertFacts) -> Iterator[Reading]:
        for source, key in facts.values:
            if not source and (key in LOSSES or key.startswith("train/loss.")):
                for one in _read_metric(facts, key, not_finite=True):
                    yield Reading(key, one.values, one.value, one.shown, key, one.step)

    def _steps(self, facts: AlertFacts) -> Iterator[Reading]:
        """Yield 1 if the run has been without a step for too long."""
        if facts.gap is None:
            yield Reading("", ())
            return
        for_s = next(rule.for_s for rule in self._rules if rule.name == named.NO_STEP)
        seconds = facts.gap.seconds
        yield Reading("", (float(facts.gap.is_stall(for_s)),), seconds, format_duration(seconds))

    def _idle(self, facts: AlertFacts) -> Iterator[Reading]:
        for uuid, values in facts.of_metric("gpu/util"):
            if uuid in facts.trains_on:
                shown = _with_unit("gpu/util", values[-1])
                yield Reading(uuid, values if facts.gap else (), values[-1], shown)

    def _lost(self, facts: AlertFacts) -> Iterator[Reading]:
        """Yield 1 for each lost GPU, 0 for a recovered GPU."""
        before = {source for name, source in self._alarms if name == named.GPU_LOST}
        for uuid in before | facts.lost.keys():
            yield Reading(uuid, (float(uuid in facts.lost),), None, facts.lost.get(uuid, ""))


def _read_metric(facts: AlertFacts, metric: str, *, not_finite: bool) -> Iterator[Reading]:
    for source, values in facts.of_metric(metric):
        odd = [value for value in values if not math.isfinite(value)] if not_finite else []
        value = odd[0] if odd else values[-1]
        step = facts.odd_steps.get((source, metric))
        yield Reading(source, values, value, _with_unit(metric, value), metric, step)


def title(name: str) -> str:
    """Return a rule's name as the beginning of a sentence.

    >>> title("gpu_idle")
    'GPU idle'
    """
    words = re.sub(r"\bgpu\b", "GPU", re.sub("[_-]+", " ", name))
    return words[:1].upper() + words[1:]


def is_device_metric(metric: str) -> bool:
    """Return True if each GPU has the metric."""
    return metric in BY_KEY and BY_KEY[metric].stream is Stream.DEVICES


def _with_unit(metric: str, value: float) -> str:
    unit = BY_KEY[metric].unit if metric in BY_KEY else Unit.NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if unit is Unit.BYTES:
        return format_bytes(value)
    number = f"{value:.4g}"
    if unit in (Unit.NONE, Unit.COUNT, Unit.MASK):
        return number
    return f"{number}{unit}" if unit is Unit.PERCENT else f"{number} {unit}"


def _text(rule: AlertRule, reading: Reading, facts: AlertFacts) -> str:
    threshold, step = rule.threshold, facts.step if reading.step is None else reading.step
    # The default rules with a threshold are in percent.
    shown = "" if threshold is None else _with_unit(rule.metric or "gpu/util", threshold)
    fields = {
        "value": reading.shown,
        "threshold": shown,
        "metric": reading.metric,
        "device": facts.label(reading.source),
        "seconds": format_duration(rule.for_s),
        "step": f"{step:,}",
    }
    return _fill(rule.text, fields)


def ending(rule: AlertRule, reason: str | None, step: int) -> str:
    """Return the text of a run's end; braces in the reason are kept."""
    return _fill(rule.text, {"value": reason or "it gives no reason.", "step": f"{step:,}"})


def _fill(text: str, fields: Mapping[str, str]) -> str:
    """Replace the fields in one pass; unknown braces are kept."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)
