"""One comparison over rounds, from its trials: the next trial, and the estimates so far. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
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
)

MAX_ATTEMPTS = 2  # Processes of one trial; then its variant has failed.
Pairs = list[tuple[float, float]]
"""Values of the reference and of a variant, a pair per round."""


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

    `left` is the maximum number of trials that follow. `broken` counts trials of a variant whose
    loss is not finite, where all losses of the reference are. `failed` has the reasons of variants
    without a measurement. `is_cut` is True if the time budget ended the comparison.
    """

    next: NextTrial | None = None
    round: int = 0
    left: int = 0
    speed: dict[str, EffectEstimate] = field(default_factory=dict)
    loss: dict[str, EffectEstimate] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False

    def is_open(self, name: str) -> bool:
        """Return True if a variant has neither failed nor a verdict on its speed."""
        decided = name in self.speed and self.speed[name].side is not Side.OPEN
        return not decided and name not in self.failed


def replay_comparison(
    comparison: VariantComparison,
    trials: Sequence[Trial],
    rules: Rules,
    seed: int,
    round_fits: Callable[[int, Sequence[str]], bool] = lambda number, names: True,
) -> ComparisonState:
    """Return the state of a comparison after its trials.

    A round, of which `round_fits` gets the number and the names, begins only if it fits.
    """
    taken = [trial for trial in trials if trial.contest == comparison.key]
    state = ComparisonState()
    remaining = list(comparison.challengers)
    for number in range(1, rules.max_rounds + 1):
        names = [*comparison.references, *remaining]
        random.Random(f"{seed}/{comparison.key}/{number}").shuffle(names)
        state.round = number
        state.is_cut = not round_fits(number, names)
        if state.is_cut:
            break
        _replay_round(state, comparison, taken, names)
        if state.next is not None:
            state.left += (rules.max_rounds - number) * len(names)
            break
        if comparison.reference in state.failed:
            break
        remaining = [name for name in remaining if name not in state.failed]
        if number in rules.decision_rounds:
            within = [trial for trial in taken if trial.round <= number]
            _estimate(state, comparison, within, remaining, rules)
            remaining = list(filter(state.is_open, remaining))
        if not remaining:
            break
    still_open = list(filter(state.is_open, remaining))
    _estimate(state, comparison, taken, still_open, rules)
    for name in still_open:  # no decision between the looks
        state.speed[name] = replace(state.speed[name], side=Side.OPEN)
    return state


def _replay_round(
    state: ComparisonState,
    comparison: VariantComparison,
    taken: Sequence[Trial],
    names: Sequence[str],
) -> None:
    """Find the first trial of a round that is missing, and the variants that have failed."""
    for place, name in enumerate(names):
        attempts = [one for one in taken if (one.round, one.name) == (state.round, name)]
        if any(one.ok for one in attempts):
            continue
        if len(attempts) < MAX_ATTEMPTS and not any(one.is_refused for one in attempts):
            state.next = NextTrial(comparison.key, state.round, name)
            state.left = len(names) - place
            return
        failed = comparison.reference if name in comparison.references else name
        state.failed[failed] = attempts[-1].reason or "No reason given."


def paired(comparison: VariantComparison, trials: Sequence[Trial], key: str) -> dict[str, Pairs]:
    """Return the pairs of a metric of each variant: one per round in which both are above 0.

    Several trials of the reference in a round count as their geometric mean.
    """
    reference: dict[int, list[float]] = {}
    values: dict[str, dict[int, float]] = {name: {} for name in comparison.challengers}
    for trial in trials:
        value = positive(trial.metrics.get(key)) if trial.ok else None
        if value is None:
            continue
        if trial.name in comparison.references:
            reference.setdefault(trial.round, []).append(value)
        elif trial.name in values:
            values[trial.name][trial.round] = value
    means = {number: statistics.geometric_mean(found) for number, found in reference.items()}
    return {
        name: [(means[number], value) for number, value in found.items() if number in means]
        for name, found in values.items()
    }


def positive(value: Any) -> float | None:
    """Return a finite number above 0, otherwise None."""
    is_positive = isinstance(value, int | float) and 0 < value < math.inf
    return float(value) if is_positive else None


def _estimate(
    state: ComparisonState,
    comparison: VariantComparison,
    trials: Sequence[Trial],
    names: Sequence[str],
    rules: Rules,
) -> None:
    """Estimate the effects of the variants `names`; all share their variance and the level."""
    rates = paired(comparison, trials, "samples_per_sec")
    losses = paired(comparison, trials, "loss")
    speed = estimate_effects({name: log_ratios(rates[name]) for name in rates}, rules)
    measured = [one for one in trials if one.ok]
    references = [one for one in measured if one.name in comparison.references]
    is_finite = all(one.metrics.get("loss_finite", True) for one in references)
    for name in names:
        state.speed[name] = speed[name]
        state.loss[name] = estimate_loss(log_ratios(losses[name]), rules)
        state.broken[name] = sum(
            is_finite and one.name == name and not one.metrics.get("loss_finite", True)
            for one in measured
        )
