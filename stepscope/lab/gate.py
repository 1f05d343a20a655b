"""Limits that a variant must not exceed, for checks of a change: `--gate step_time:+3%`. Pure.

A gate passes if the confidence interval of the metric's change ends at or below the limit, is a
regression if the interval is above it, otherwise inconclusive. The interval is over rounds, each
with a fresh process of the baseline and of the variant: two runs of one script often differ by more
than the steps of one run, so a test over steps would find differences that are not there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepscope.lab.comparison import VariantComparison, paired, positive
from stepscope.lab.folder import Trial
from stepscope.lab.plan import SweepPlan
from stepscope.lab.statistics import ALPHA, confidence_interval, log_ratios
from stepscope.lab.sweep_state import BASELINE, SweepPhase
from stepscope.lab.verdict_text import percent, signed

METRICS = {
    "step_time": ("step_time",),
    "peak_memory": ("peak_allocated", "peak_process"),
    "energy": ("energy_per_sample",),
}
"""Keys of a trial's metrics by the name of a gate, in order of preference."""
_GATE = re.compile(r"(\w+):\+?(\d{1,3}(?:\.\d+)?)%")


class GateVerdict(StrEnum):
    """The result of a gate, in increasing severity."""

    PASSED = "passed"
    INCONCLUSIVE = "inconclusive"
    REGRESSION = "regression"


EXIT_CODES = {GateVerdict.PASSED: 0, GateVerdict.INCONCLUSIVE: 3, GateVerdict.REGRESSION: 4}


@dataclass(frozen=True, slots=True)
class Gate:
    """The largest accepted increase of a metric, as a fraction."""

    metric: str
    limit: float


@dataclass(frozen=True, slots=True)
class GateResult:
    """The change of a metric as fractions; None without two rounds, or without a spread."""

    gate: Gate
    variant: str
    verdict: GateVerdict
    rounds: int
    change: float | None = None
    low: float | None = None
    high: float | None = None


def parse_gate(text: str) -> Gate:
    """Return the gate of an option. Raises ValueError.

    >>> parse_gate("peak_memory:+5%")
    Gate(metric='peak_memory', limit=0.05)
    """
    found = _GATE.fullmatch(text.strip())
    if found is None or found[1] not in METRICS:
        raise ValueError(
            f"must be METRIC:+PERCENT% with {', '.join(METRICS)}, got {text[:80]!r}. "
            "Use step_time:+3%."
        )
    return Gate(found[1], float(found[2]) / 100)


def check_gates(
    plan: SweepPlan, trials: Sequence[Trial], gates: Sequence[Gate]
) -> list[GateResult]:
    """Return the result of each gate for each variant; all share the error rate (Bonferroni)."""
    names = tuple(variant.name for variant in plan.runnable)
    level = ALPHA / max(1, len(gates) * len(names))
    comparison = VariantComparison(SweepPhase.VARIANTS, BASELINE, names, plan.baselines)
    measured = [trial for trial in trials if trial.contest == SweepPhase.VARIANTS]
    results = []
    for gate in gates:
        pairs = paired(comparison, measured, metric_key(measured, gate.metric) or "")
        results += [_check_gate(gate, name, pairs[name], level) for name in names]
    return results


def _check_gate(
    gate: Gate, variant: str, pairs: Sequence[tuple[float, float]], level: float
) -> GateResult:
    if len(pairs) < 2:
        return GateResult(gate, variant, GateVerdict.INCONCLUSIVE, len(pairs))
    interval = confidence_interval(log_ratios(pairs), level)
    return gate_result(gate, variant, len(pairs), interval)


def gate_result(
    gate: Gate, variant: str, rounds: int, interval: tuple[float, float, float]
) -> GateResult:
    change, low, high = interval
    verdict = GateVerdict.INCONCLUSIVE
    if low > gate.limit:
        verdict = GateVerdict.REGRESSION
    elif high <= gate.limit:
        verdict = GateVerdict.PASSED
    return GateResult(gate, variant, verdict, rounds, change, low, high)


def metric_key(trials: Sequence[Trial], metric: str) -> str | None:
    """Return the first key of a metric that a trial has a value of, or None."""
    for key in METRICS[metric]:
        if any(positive(trial.metrics.get(key)) is not None for trial in trials):
            return key
    return None


def worst(results: Sequence[GateResult]) -> GateVerdict:
    order = list(GateVerdict)
    return max((result.verdict for result in results), key=order.index)


def markdown(results: Sequence[GateResult], unit: str = "Rounds") -> str:
    """Return the results as a table in Markdown; an interval is over `unit`."""
    lines = [
        f"| Variant | Metric | Limit | Change | Interval | {unit} | Verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        change = "n/a" if result.change is None else signed(result.change)
        interval = "n/a"
        if result.low is not None and result.high is not None:
            interval = f"{signed(result.low)} to {signed(result.high)}"
        name = result.variant.replace("|", "\\|")
        lines.append(
            f"| {name} | {result.gate.metric} | +{percent(result.gate.limit)} | {change} "
            f"| {interval} | {result.rounds} | **{result.verdict}** |"
        )
    return "\n".join(lines) + "\n"
