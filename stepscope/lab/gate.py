"""Limits that a variant must not exceed, for checks of a change: `--gate step_time:+3%`. Pure.

A gate passes if the confidence interval of the metric's change ends at or below the limit, is a
regression if the interval is above it, otherwise inconclusive. The interval is over rounds, each
with a fresh process of the baseline and of the variant: two runs of one script often differ by more
than the steps of one run, so a test over steps would find differences that are not there.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepscope.lab.comparison import VariantComparison, of_contest
from stepscope.lab.folder import Trial
from stepscope.lab.plan import SweepPlan
from stepscope.lab.statistics import confidence_interval, log_ratios
from stepscope.lab.sweep_state import BASELINE, VARIANTS
from stepscope.lab.verdict_text import percent, signed

METRICS = {
    "step_time": ("step_time",),
    "peak_memory": ("peak_allocated", "peak_process"),
    "energy": ("energy_per_sample",),
}
"""Keys of a trial's metrics by the name of a gate, in order of preference."""
ASSUMED_SPREAD = 0.012
"""Standard deviation between processes as a fraction, until the sweep has measured it."""
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
            f"--gate: must be METRIC:+PERCENT% with {', '.join(METRICS)}, got {text[:80]!r}. "
            "Use step_time:+3%."
        )
    return Gate(found[1], float(found[2]) / 100)


def check_gates(
    plan: SweepPlan, trials: Sequence[Trial], gates: Sequence[Gate]
) -> list[GateResult]:
    """Return the result of each gate for each variant; all share `plan.alpha` (Bonferroni)."""
    variants = [variant.name for variant in plan.variants if variant.problem is None]
    level = plan.alpha / max(1, len(gates) * len(variants))
    measured = [trial for trial in of_contest(trials, VARIANTS) if trial.ok]
    references = VariantComparison(VARIANTS, BASELINE, (), plan.baselines).references
    return [
        _check_gate(gate, name, _pairs(measured, references, name, gate.metric), level)
        for gate in gates
        for name in variants
    ]


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


def _pairs(
    trials: Sequence[Trial], references: Sequence[str], variant: str, metric: str
) -> list[tuple[float, float]]:
    """Return (baseline, variant) of each round that has both; several baselines as their mean."""
    baseline: dict[int, list[float]] = {}
    found: dict[int, float] = {}
    key = metric_key(trials, metric)
    for trial in trials:
        value = _value(trial.metrics, key)
        if value is None:
            continue
        if trial.name in references:
            baseline.setdefault(trial.round, []).append(value)
        elif trial.name == variant:
            found[trial.round] = value
    return [
        (statistics.geometric_mean(baseline[number]), value)
        for number, value in sorted(found.items())
        if number in baseline
    ]


def metric_key(trials: Sequence[Trial], metric: str) -> str | None:
    """Return the key that most trials have, so that all compare the same; None without a value."""
    values = ((_value(trial.metrics, key), key) for key in METRICS[metric] for trial in trials)
    counts = Counter(key for value, key in values if value is not None)
    return max(counts, key=counts.__getitem__, default=None)


def _value(metrics: Mapping[str, Any], key: str | None) -> float | None:
    value = metrics.get(key or "")
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return float(value)
    return None


def expected_resolution(plan: SweepPlan, gates: int, spread: float = ASSUMED_SPREAD) -> float:
    """Return the half width of the interval if processes vary by `spread` (fractions)."""
    variants = max(1, sum(variant.problem is None for variant in plan.variants))
    level = plan.alpha / (gates * variants)
    # The differences of `max_rounds` pairs with that standard deviation and the mean 0.
    size = spread * math.sqrt(1 + 1 / plan.baselines)
    half = math.sqrt((plan.max_rounds - 1) / plan.max_rounds)
    values = [size * half * (-1) ** number for number in range(plan.max_rounds)]
    mean, _, high = confidence_interval(values, level)
    return high - mean


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
