"""Evaluate all alert rules once a second; pure, no I/O.

An alert instance is the state of a rule for one source: "" for the process, the UUID of a GPU, the
key of a loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from stepscope.alerts.settings import ENDINGS, NO_STEP, AlertRule, AlertState
from stepscope.common.formatting import format_bytes, format_duration
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.common.stall_detector import StepGap
from stepscope.gpu.device_events import throttle_words

RETRIED_S = 60.0  # time for which a retried allocation counts
LOSSES = ("train/loss", "val/loss")


def holds(rule: AlertRule, values: Sequence[float]) -> bool | None:
    """Return True if a rule holds for the values since the last evaluation, newest last.

    A rule without `for_s` holds if any value is bad; other rules hold only if all values are.
    Returns False if it is over, None between the threshold and `clear`, or without a value.
    """
    if rule.not_finite and values:
        is_bad = not all(map(math.isfinite, values))
        return is_bad and (rule.for_s == 0 or not math.isfinite(values[-1]))
    sign = 1 if rule.below is None else -1
    known = [sign * value for value in values if not math.isnan(value)]
    if not known:
        return None
    threshold = sign * (rule.threshold or 0.0)
    clear = threshold if rule.clear is None else min(threshold, sign * rule.clear)
    if (max(known) if rule.for_s == 0 else min(known)) > threshold:
        return True
    return False if max(known) <= clear else None


@dataclass(slots=True)
class AlertInstance:
    """State of one rule for one GPU or process."""

    for_s: float
    clear_s: float
    raised: bool = False
    raised_at: float = 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertFacts:
    """Input of one evaluation.

    `values`: since the last evaluation, by source and metric, newest last. `gap`: the time without
    a step, None unless one is due. `lost`: reason by UUID of each lost GPU; `labels`: names of
    GPUs. `trains_on`: GPUs of all processes of the run; `own`: the GPU of this process.
    """

    now: float
    step: int = 0
    gap: StepGap | None = None
    values: Mapping[tuple[str, str], Sequence[float]] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    trains_on: frozenset[str] = frozenset()
    own: str | None = None

    def label(self, source: str) -> str:
        """Return the name of a GPU, or "The process"."""
        return self.labels.get(source, source) or "The process"

    def of_metric(self, metric: str) -> Iterator[tuple[str, Sequence[float]]]:
        """Yield source and values of a metric."""
        return ((source, found) for (source, key), found in self.values.items() if key == metric)


@dataclass(frozen=True, slots=True)
class AlertChange:
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


class AlertEvaluator:
    """Alert instances of one process's run. Not thread-safe."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = [rule for rule in rules if rule.enabled and rule.name not in ENDINGS]
        self._instances: dict[tuple[str, str], AlertInstance] = {}
        self._retries: float | None = None
        self._retried_at = -math.inf

    def evaluate(self, facts: AlertFacts) -> list[AlertChange]:
        """Return the alert instances that changed; call it about once a second."""
        return [
            change
            for rule in self._rules
            for reading in self._readings(rule, facts)
            if (change := self._update(rule, reading, facts)) is not None
        ]

    def _readings(self, rule: AlertRule, facts: AlertFacts) -> Iterable[Reading]:
        if rule.metric:
            return _read_metric(rule, rule.metric, facts)
        if rule.not_finite:
            return _read_losses(rule, facts)
        return READERS[rule.name](self, rule, facts)

    def _update(self, rule: AlertRule, reading: Reading, facts: AlertFacts) -> AlertChange | None:
        # The gap of NO_STEP is that long already.
        for_s = 0.0 if rule.name == NO_STEP else rule.for_s
        place = rule.name, reading.source
        instance = self._instances.setdefault(place, AlertInstance(for_s, rule.clear_s))
        state = instance.update(facts.now, holds(rule, reading.values))
        if state is None:
            return None
        text = _text(rule, reading, facts)
        if state is AlertState.CLEARED:
            lasted = format_duration(facts.now - instance.raised_at)
            about = facts.label(reading.source) if reading.source else reading.metric
            text = f"{title(rule.name)}{f' ({about})' if about else ''}: cleared after {lasted}"
        return AlertChange(rule, state, reading.source, text, reading.value)

    def _memory(self, rule: AlertRule, facts: AlertFacts) -> Iterator[Reading]:
        """Yield the used memory in percent, or 0 if no allocation was retried."""
        own = facts.own or ""
        retries = facts.values.get(("", "memory/alloc_retries"))
        used = facts.values.get((own, "gpu/mem_used"))
        total = facts.values.get((own, "gpu/mem_total"))
        if retries:
            if self._retries is not None and retries[-1] > self._retries:
                self._retried_at = facts.now
            self._retries = retries[-1]
        if not own or not used or not total or self._retries is None:
            return
        percent = [100 * value / total[-1] for value in used]
        is_retried = facts.now - self._retried_at < RETRIED_S
        values = percent if is_retried else [0.0]
        yield Reading(own, values, percent[-1], f"{percent[-1]:.0f}%")

    def _throttling(self, rule: AlertRule, facts: AlertFacts) -> Iterator[Reading]:
        """Yield 1 for a GPU with a thermal reason in any sample: the bit may flicker."""
        for uuid, masks in facts.of_metric("gpu/throttle_reasons"):
            known = [int(mask) for mask in masks if 0 <= mask < 2**63]
            if uuid in facts.trains_on and known:
                words = [word for word in throttle_words(reduce(or_, known)) if "thermal" in word]
                yield Reading(uuid, [float(bool(words))], masks[-1], ", ".join(words))

    def _no_step(self, rule: AlertRule, facts: AlertFacts) -> Iterator[Reading]:
        """Yield 1 if the run has been without a step for too long."""
        gap = facts.gap
        if gap is None:
            yield Reading("", ())
        else:
            is_stall = gap.is_stall(rule.for_s)
            yield Reading("", [float(is_stall)], gap.seconds, format_duration(gap.seconds))

    def _idle(self, rule: AlertRule, facts: AlertFacts) -> Iterator[Reading]:
        for uuid, values in facts.of_metric("gpu/util"):
            if uuid in facts.trains_on:
                shown = _with_unit("gpu/util", values[-1])
                yield Reading(uuid, values if facts.gap else (), values[-1], shown)

    def _lost(self, rule: AlertRule, facts: AlertFacts) -> Iterator[Reading]:
        """Yield 1 for each lost GPU, 0 for a recovered GPU."""
        before = {source for name, source in self._instances if name == rule.name}
        for uuid in before | facts.lost.keys():
            yield Reading(uuid, [float(uuid in facts.lost)], None, facts.lost.get(uuid, ""))


READERS: Mapping[str, Callable[[AlertEvaluator, AlertRule, AlertFacts], Iterator[Reading]]] = {
    "memory_full": AlertEvaluator._memory,
    "throttling": AlertEvaluator._throttling,
    NO_STEP: AlertEvaluator._no_step,
    "gpu_idle": AlertEvaluator._idle,
    "gpu_lost": AlertEvaluator._lost,
}
"""The values of the default rules by name."""


def is_loss(key: str) -> bool:
    """Return True if the default rules watch this metric of a step."""
    return key in LOSSES or key.startswith("train/loss.")


def _read_losses(rule: AlertRule, facts: AlertFacts) -> Iterator[Reading]:
    for source, key in facts.values:
        if not source and is_loss(key):
            for one in _read_metric(rule, key, facts):
                yield Reading(key, one.values, one.value, one.shown, key)


def _read_metric(rule: AlertRule, metric: str, facts: AlertFacts) -> Iterator[Reading]:
    for source, values in facts.of_metric(metric):
        odd = [value for value in values if not math.isfinite(value)] if rule.not_finite else []
        value = odd[0] if odd else values[-1]
        yield Reading(source, values, value, _with_unit(metric, value), metric)


def title(name: str) -> str:
    """Return a rule's name as the beginning of a sentence.

    >>> title("gpu_idle")
    'GPU idle'
    """
    words = re.sub(r"\bgpu\b", "GPU", re.sub("[_-]+", " ", name))
    return words[:1].upper() + words[1:]


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
    # The default rules with a threshold are in percent.
    threshold = rule.threshold
    shown = "" if threshold is None else _with_unit(rule.metric or "gpu/util", threshold)
    fields = {
        "value": reading.shown,
        "threshold": shown,
        "metric": reading.metric,
        "device": facts.label(reading.source),
        "seconds": format_duration(rule.for_s),
        "step": f"{facts.step:,}",
    }
    return fill(rule.text, fields)


def fill(text: str, fields: Mapping[str, str]) -> str:
    """Replace the fields in one pass; unknown braces are kept."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)
