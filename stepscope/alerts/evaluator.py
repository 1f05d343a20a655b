"""Evaluate all alert rules once, on what is known now. Pure.

A rule has an alarm for each source: "" for the process, a UUID for a GPU. The default rules that
need more than one number (memory full, throttling, stalled) have their conditions here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.alerts.rules import (
    ENDINGS,
    GPU_IDLE,
    GPU_LOST,
    LOSS,
    MEMORY_FULL,
    NO_STEP,
    THROTTLING,
    AlertInstance,
    AlertRule,
    AlertState,
    RuleMatch,
    WindowStats,
    condition_of,
)
from stepscope.common.formatting import format_bytes, format_duration
from stepscope.gpu.device_events import throttle_words
from stepscope.metrics import BY_KEY, Stream, Unit

RETRIED_S = 60.0
"""How long a retry of an allocation counts."""
WARM_STEPS = 3
"""Changes of the step after which a run is warm: the first steps compile and allocate."""
PATIENCE = 2.0
"""A step may take this many times the longest wait so far before it counts as stuck."""


@dataclass(slots=True)
class AllocRetryTracker:
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


def memory_condition(rule: AlertRule, share: WindowStats | None, retried: bool | None) -> RuleMatch:
    """Judge the used share of a device's memory (%), together with retries of allocations."""
    if share is None or share.low is None or share.high is None or retried is None:
        return RuleMatch.UNKNOWN
    if not retried or share.high <= rule.clear:
        return RuleMatch.OVER
    return RuleMatch.HOLDS if share.high > rule.threshold else RuleMatch.BETWEEN


def throttling_condition(mask: WindowStats | None) -> tuple[RuleMatch, str]:
    """Judge `gpu/throttle_reasons`; return the thermal reasons in words as well.

    Any sample of the span counts: a driver that lowers clocks by heat lets the bit flicker.
    """
    if mask is None or not 0 <= mask.last < 2**63:
        return RuleMatch.UNKNOWN, ""
    words = [word for word in throttle_words(mask.bits) if "thermal" in word]
    return (RuleMatch.HOLDS if words else RuleMatch.OVER), ", ".join(words)


@dataclass(slots=True)
class StallDetector:
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

    def condition(self, rule: AlertRule, silent_s: float | None) -> RuleMatch:
        """Judge the seconds without a step."""
        if silent_s is None:
            return RuleMatch.UNKNOWN
        is_stuck = silent_s >= max(rule.for_s, PATIENCE * self.longest_s)
        return RuleMatch.HOLDS if is_stuck else RuleMatch.OVER


LOSSES = ("train/loss", "val/loss")
_FIELD = re.compile(r"\{(\w+)\}")
FIELDS = frozenset({"value", "threshold", "metric", "device", "seconds", "step"})
"""What a rule's text may name in braces."""
FIELDS_OF_ENDINGS = frozenset({"value", "step"})
"""What the text of a rule about the end of a run may name; `value` is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertInputs:
    """What is known at one look.

    `spans` are by source and metric, `lost` has the reason for each GPU that is gone, `labels` the
    names of GPUs. `trains_on` are the GPUs that processes of this run train on, `own` the one of
    this process; `own_total` its memory in bytes, where no driver is asked. `step_due`: the run
    trains, and nothing of ours holds it up. `sign` moves with work of it that is no step.
    """

    now: float
    step: int = 0
    step_due: bool = False
    sign: int = 0
    spans: Mapping[tuple[str, str], WindowStats] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    trains_on: frozenset[str] = frozenset()
    own: str | None = None
    own_total: float | None = None

    def label(self, source: str) -> str:
        """Return the name of a GPU; the process has none."""
        return self.labels.get(source, source) or "The process"

    def about(self, metric: str) -> Iterator[tuple[str, WindowStats]]:
        """Yield the spans of a metric by source."""
        for (source, key), span in self.spans.items():
            if key == metric:
                yield source, span


@dataclass(frozen=True, slots=True)
class AlertTransition:
    """An alarm that was raised or cleared; `value` is what was measured, None for no number."""

    rule: AlertRule
    state: AlertState
    source: str
    text: str
    value: float | None


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one look says of a rule for one source; `shown` is the value in words."""

    condition: RuleMatch
    value: float | None = None
    shown: str = ""
    metric: str = ""
    step: int | None = None


Findings = Iterable[tuple[str, _Finding]]


class RuleEvaluator:
    """Holds the alarms of one process's run; one thread calls `look` about once a second."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = [rule for rule in rules if rule.enabled and rule.name not in ENDINGS]
        self._alarms: dict[tuple[str, str], AlertInstance] = {}
        self._retries = AllocRetryTracker()
        self._clock = StallDetector()
        self._special: dict[str, Callable[[AlertRule, AlertInputs], Findings]] = {
            MEMORY_FULL: self._memory,
            THROTTLING: self._throttling,
            LOSS: self._losses,
            NO_STEP: self._steps,
            GPU_IDLE: self._idle,
            GPU_LOST: self._lost,
        }
        self._silent_s: float | None = None

    def look(self, facts: AlertInputs) -> list[AlertTransition]:
        """Return what has changed."""
        self._silent_s = self._clock.look(
            facts.now, facts.step, due=facts.step_due, sign=facts.sign
        )
        changes = []
        for rule in self._rules:
            special = self._special.get(rule.name) if not rule.metric else None
            findings = special(rule, facts) if special is not None else _of_metric(rule, facts)
            for source, finding in findings:
                change = self._judged(rule, source, finding, facts)
                if change is not None:
                    changes.append(change)
        return changes

    def _judged(
        self, rule: AlertRule, source: str, finding: _Finding, facts: AlertInputs
    ) -> AlertTransition | None:
        alarm = self._alarms.get((rule.name, source))
        if alarm is None:
            # The clock of the steps has waited already.
            for_s = 0.0 if rule.name == NO_STEP else rule.for_s
            alarm = self._alarms[rule.name, source] = AlertInstance(for_s, rule.clear_s)
        state = alarm.judge(facts.now, finding.condition)
        if state is None:
            return None
        if state is AlertState.CLEARED:
            lasted = format_duration(facts.now - alarm.raised_at)
            about = facts.label(source) if source else finding.metric or rule.metric
            text = f"{title(rule.name)}{f' ({about})' if about else ''}: cleared after {lasted}"
        else:
            text = filled(rule, facts.label(source), finding, facts.step)
        return AlertTransition(rule, state, source, text, finding.value)

    def _memory(self, rule: AlertRule, facts: AlertInputs) -> Findings:
        own, spans = facts.own, facts.spans
        retries = spans.get(("", "memory/alloc_retries"))
        retried = self._retries.look(facts.now, retries.last if retries is not None else None)
        if own is None:
            return
        # The driver counts all processes; where it is not asked, this one's cache is known.
        used = spans.get((own, "gpu/mem_used")) or spans.get(("", "memory/reserved"))
        whole = spans.get((own, "gpu/mem_total"))
        total = whole.last if whole is not None else facts.own_total
        share = None if used is None or not total else _percent(used, total)
        condition = memory_condition(rule, share, retried)
        last = share.last if share is not None else None
        yield own, _Finding(condition, last, "" if last is None else f"{last:.0f} %")

    def _throttling(self, rule: AlertRule, facts: AlertInputs) -> Findings:
        for uuid, span in facts.about("gpu/throttle_reasons"):
            if uuid in facts.trains_on:
                condition, words = throttling_condition(span)
                yield uuid, _Finding(condition, span.last, words)

    def _losses(self, rule: AlertRule, facts: AlertInputs) -> Findings:
        for (source, key), span in facts.spans.items():
            if source == "" and (key in LOSSES or key.startswith("train/loss.")):
                odd = span.odd if span.odd is not None else span.last
                yield (
                    key,
                    _Finding(condition_of(rule, span), odd, _words(key, odd), key, span.odd_step),
                )

    def _steps(self, rule: AlertRule, facts: AlertInputs) -> Findings:
        silent_s = self._silent_s
        condition = self._clock.condition(rule, silent_s)
        yield "", _Finding(condition, silent_s, format_duration(silent_s))

    def _idle(self, rule: AlertRule, facts: AlertInputs) -> Findings:
        works = facts.step_due and self._clock.is_warm
        for uuid, span in facts.about("gpu/util"):
            if uuid in facts.trains_on:
                condition = condition_of(rule, span) if works else RuleMatch.UNKNOWN
                yield uuid, _Finding(condition, span.last, _words("gpu/util", span.last))

    def _lost(self, rule: AlertRule, facts: AlertInputs) -> Findings:
        known = {source for name, source in self._alarms if name == rule.name}
        for uuid in known | facts.lost.keys():
            is_lost = uuid in facts.lost
            condition = RuleMatch.HOLDS if is_lost else RuleMatch.OVER
            yield uuid, _Finding(condition, None, facts.lost.get(uuid, ""))


def _of_metric(rule: AlertRule, facts: AlertInputs) -> Findings:
    """Judge a rule over a metric for each source that has it."""
    for source, span in facts.about(rule.metric):
        value = span.odd if rule.comparison == "not_finite" and span.odd is not None else span.last
        finding = _Finding(
            condition_of(rule, span), value, _words(rule.metric, value), rule.metric, span.odd_step
        )
        yield source, finding


def _percent(span: WindowStats, total: float) -> WindowStats:
    low = None if span.low is None else 100 * span.low / total
    high = None if span.high is None else 100 * span.high / total
    return WindowStats(low, high, 100 * span.last / total)


def title(name: str) -> str:
    """Return a rule's name as the words that begin a sentence.

    >>> title("gpu_idle")
    'GPU idle'
    """
    words = re.sub(r"\bgpu\b", "GPU", re.sub("[_-]+", " ", name))
    return words[:1].upper() + words[1:]


def is_of_devices(metric: str) -> bool:
    """Say whether a metric is one of each GPU."""
    return metric in BY_KEY and BY_KEY[metric].stream is Stream.DEVICES


def _words(metric: str, value: float) -> str:
    """Return a value with its unit."""
    unit = BY_KEY[metric].unit if metric in BY_KEY else Unit.NONE
    if math.isfinite(value):
        if unit is Unit.BYTES:
            return format_bytes(value)
        number = f"{value:.4g}"
        return number if unit in (Unit.NONE, Unit.COUNT, Unit.MASK) else f"{number} {unit}"
    return "NaN" if math.isnan(value) else "infinite"


def filled(rule: AlertRule, device: str, finding: _Finding, step: int) -> str:
    """Return the rule's text with its fields filled; other braces stay as they are."""
    percent = "gpu/util"  # as the shares of memory
    unit_of = rule.metric or percent
    fields = {
        "value": finding.shown,
        "threshold": "" if math.isnan(rule.threshold) else _words(unit_of, rule.threshold),
        "metric": finding.metric or rule.metric,
        "device": device,
        "seconds": format_duration(rule.for_s),
        "step": f"{finding.step if finding.step is not None else step:,}",
    }
    return _with(fields, rule.text)


def ending(rule: AlertRule, reason: str | None, step: int) -> str:
    """Return the text of a run's end; braces in the reason stay as they are."""
    return _with({"value": reason or "it gives no reason.", "step": f"{step:,}"}, rule.text)


def _with(fields: Mapping[str, str], text: str) -> str:
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), text)
