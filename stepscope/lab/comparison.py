"""One comparison over rounds, from its trials: the next trial, and the estimates so far. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.lab.folder import Trial
from stepscope.lab.statistics import (
    EffectEstimate,
    Rules,
    Side,
    estimate_effects,
    estimate_loss,
    log_ratios,
    loss_differences,
)

MAX_ATTEMPTS = 2  # At one trial; then its variant has failed.
MAX_FAILURES = 3  # Of a variant in all rounds; then the variant has failed.
RATE, MEAN_RATE = "samples_per_sec", "mean_samples_per_sec"
Pairs = list[tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Metrics of the reference and of a variant, a pair per round."""
RoundFits = Callable[[int, Sequence[str]], bool]


@dataclass(frozen=True, slots=True)
class NextTrial:
    """The next trial; `contest` is the key of its comparison."""

    contest: str
    round: int
    name: str


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """A reference, with `runs` trials per round, and variants; `key` is `contest` of its trials."""

    key: str
    reference: str
    challengers: tuple[str, ...]
    runs: int = 1

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the reference's trials in a round: "baseline", "baseline 2", …"""
        return (self.reference, *(f"{self.reference} {run}" for run in range(2, self.runs + 1)))


@dataclass(slots=True)
class ComparisonState:
    """The state of a comparison; `next` is None at its end.

    `left` is the maximum number of trials that follow. `broken` counts rounds with a finite loss of
    the reference only. `mean_effect` is on the mean rate over all steps, which includes stalls.
    `failed` has reasons of variants without a measurement, `flaky` of any failed process.
    """

    next: NextTrial | None = None
    round: int = 0
    left: int = 0
    speed: dict[str, EffectEstimate] = field(default_factory=dict)
    loss: dict[str, EffectEstimate] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    mean_effect: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False
    """True if the time budget ended the comparison before a decision."""
    flaky: dict[str, str] = field(default_factory=dict)


def of_contest(trials: Iterable[Trial], key: str) -> list[Trial]:
    return [trial for trial in trials if trial.contest == key]


def replay_comparison(
    comparison: VariantComparison,
    trials: Sequence[Trial],
    rules: Rules,
    seed: int,
    fits: RoundFits | None = None,
) -> ComparisonState:
    """Return the state of a comparison after its trials; a round begins only if it `fits`."""
    taken = of_contest(trials, comparison.key)
    state = ComparisonState()
    state.flaky = {name: text for name in comparison.challengers if (text := _flaky(taken, name))}
    remaining = list(comparison.challengers)
    for number in range(1, rules.max_rounds + 1):
        state.round = number
        names = [*comparison.references, *remaining]
        random.Random(f"{seed}/{comparison.key}/{number}").shuffle(names)
        if fits is not None and not fits(number, names):
            state.is_cut = True
            break
        for place, name in enumerate(names):
            attempts = [one for one in taken if (one.round, one.name) == (number, name)]
            if any(one.ok for one in attempts):
                continue
            is_reference = name in comparison.references
            failures = sum(not one.ok for one in taken if one.name == name)
            too_often = not is_reference and failures >= MAX_FAILURES
            is_refused = any(one.is_refused for one in attempts)
            if len(attempts) < MAX_ATTEMPTS and not too_often and not is_refused:
                state.next = NextTrial(comparison.key, number, name)
                state.left = len(names) - place + (rules.max_rounds - number) * len(names)
                break
            state.failed[comparison.reference if is_reference else name] = (
                state.flaky[name] if too_often else attempts[-1].reason or "No reason given."
            )
        if state.next is not None or comparison.reference in state.failed:
            break
        remaining = [name for name in remaining if name not in state.failed]
        if number in rules.decision_rounds:
            _estimate(state, _pairs(comparison, taken, number), remaining, rules, decides=True)
            remaining = [name for name in remaining if name not in state.decided]
        if not remaining:
            break
    pairs = _pairs(comparison, taken, rules.max_rounds)
    still_open = [name for name in remaining if name not in state.failed]
    _estimate(state, pairs, still_open, rules, decides=False)
    for name in state.speed:
        if (mean := _mean_effect(pairs[name])) is not None:
            state.mean_effect[name] = mean
    return state


def _flaky(trials: Sequence[Trial], name: str) -> str | None:
    """Return the number of failed processes of a variant, and the last reason."""
    failed = [one for one in trials if one.name == name and not one.ok]
    if not failed:
        return None
    count = sum(one.name == name for one in trials)
    return f"{len(failed)} of {count} processes failed: {failed[-1].reason}"


def _pairs(comparison: VariantComparison, trials: Sequence[Trial], last: int) -> dict[str, Pairs]:
    """Return the pairs of metrics of each variant in the rounds up to `last`."""
    ok = [one for one in trials if one.ok and one.round <= last]
    runs: dict[int, list[Mapping[str, Any]]] = {}
    for one in ok:
        if one.name in comparison.references:
            runs.setdefault(one.round, []).append(one.metrics)
    reference = {number: _combined(of_round) for number, of_round in runs.items()}
    found: dict[str, Pairs] = {name: [] for name in comparison.challengers}
    for one in ok:
        if one.name in found and one.round in reference:
            found[one.name].append((reference[one.round], one.metrics))
    return found


def _combined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the reference of a round: geometric means of its rates, the mean of its losses."""
    rates = {}
    for name in (RATE, MEAN_RATE):
        values = [rate for metrics in runs if (rate := metrics.get(name)) is not None and rate > 0]
        if len(values) == len(runs):
            rates[name] = statistics.geometric_mean(values)
    losses = [loss for metrics in runs if (loss := _loss(metrics)) is not None]
    return {**rates, "loss": statistics.fmean(losses) if losses else None}


def _loss(metrics: Mapping[str, Any]) -> float | None:
    loss = metrics.get("loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _mean_effect(pairs: Pairs) -> float | None:
    """Return the effect on the mean rates, a fraction; None if a round has none."""
    rates = [(a.get(MEAN_RATE) or 0.0, b.get(MEAN_RATE) or 0.0) for a, b in pairs]
    if not rates or min(map(min, rates)) <= 0:
        return None
    return math.expm1(statistics.fmean(log_ratios(rates)))


def _estimate(
    state: ComparisonState,
    pairs: Mapping[str, Pairs],
    names: Sequence[str],
    rules: Rules,
    *,
    decides: bool,
) -> None:
    """Estimate the effects of these variants; between looks their speed stays open."""
    ratios = {
        name: log_ratios([(a[RATE], b[RATE]) for a, b in found]) for name, found in pairs.items()
    }
    speed = estimate_effects(ratios, rules)
    for name in names:
        state.speed[name] = speed[name] if decides else replace(speed[name], side=Side.OPEN)
        if state.speed[name].side is not Side.OPEN:
            state.decided.add(name)
        losses = [(_loss(a), _loss(b)) for a, b in pairs[name]]
        finite = [(a, b) for a, b in losses if a is not None and b is not None]
        values, are_logs = loss_differences(finite)
        state.loss[name] = estimate_loss(values, rules, are_logs=are_logs)
        state.broken[name] = sum(
            a is not None and b is None and not metrics["loss_finite"]
            for (a, b), (_, metrics) in zip(losses, pairs[name], strict=True)
        )
