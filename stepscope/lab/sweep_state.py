"""The state of a sweep, from its plan and its trials: the next trial and its purpose. Pure.

All variants are compared with the baseline. Then the faster ones, as far as they can be combined,
are confirmed in fresh rounds, because the largest of many estimates is biased upwards: all of them
together, and the fastest of them alone. A time budget ends the rounds earlier: a sweep is replayed
from its trials, so each decision depends only on the trials before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepscope.lab.comparison import (
    ComparisonState,
    NextTrial,
    VariantComparison,
    replay_comparison,
)
from stepscope.lab.folder import Trial
from stepscope.lab.plan import MAX_CONFIRMED, SweepPlan
from stepscope.lab.statistics import Rules, Side

BASELINE = "baseline"
MIN_CONFIRMING_ROUNDS = 5


class SweepPhase(StrEnum):
    """The current phase of a sweep; the value is `contest` of its trials."""

    CALIBRATE = "calibrate"
    VARIANTS = "variants"
    CONFIRM = "confirm"


@dataclass(frozen=True, slots=True)
class Combination:
    """Variants whose changes are confirmed together."""

    variants: tuple[str, ...]
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return " + ".join(self.variants)


@dataclass(slots=True)
class SweepState:
    """The state of a sweep; `next` is None at its end, and `failed` the reason of an error.

    `left_out` has the reasons of faster variants that are in no combination, `changes` those of
    each name of `next`.
    """

    phase: SweepPhase
    variants: ComparisonState = field(default_factory=ComparisonState)
    confirmed: ComparisonState | None = None
    rules: Rules | None = None
    """The rules of the confirmation."""
    combinations: list[Combination] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    next: NextTrial | None = None
    changes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: str | None = None

    @property
    def current(self) -> ComparisonState:
        """The state of the current comparison."""
        return self.variants if self.confirmed is None else self.confirmed

    @property
    def open_round(self) -> tuple[str, int] | None:
        """Key and number of the incomplete round; None at the end of the sweep."""
        is_over = self.next is None and self.failed is None
        return None if is_over else (self.phase, self.current.round)

    @property
    def best(self) -> Combination | None:
        """The combination with the largest effect, of those whose loss is not worse if any."""
        confirmed = self.confirmed
        if confirmed is None:
            return None

        def rank(one: Combination) -> tuple[bool, bool, float]:
            estimate = confirmed.speed.get(one.name)
            effect = None if estimate is None else estimate.effect
            is_valid = one.name not in confirmed.failed
            return is_valid, not is_loss_worse(confirmed, one.name), effect or 0.0

        return max(self.combinations, key=rank)


def replay_sweep(plan: SweepPlan, trials: Sequence[Trial]) -> SweepState:
    """Return the state of a sweep after its trials."""
    variants = {variant.name: variant.changes for variant in plan.runnable}
    comparison = VariantComparison(SweepPhase.VARIANTS, BASELINE, tuple(variants), plan.baselines)
    round_fits = _budget_test(plan, trials)
    state = replay_comparison(comparison, trials, plan.rules, plan.seed, round_fits)
    found = SweepState(SweepPhase.VARIANTS, state, next=state.next)
    found.changes = {name: {} for name in comparison.references} | variants
    if BASELINE in state.failed:
        found.failed = f"The baseline cannot be measured: {state.failed[BASELINE]}"
    elif state.next is None and plan.find_best:
        _combine(found, plan)
        if found.combinations:
            _confirm(found, plan, trials)
    return found


def is_loss_worse(state: ComparisonState, name: str) -> bool:
    """Return True if a variant's loss is larger than the reference's, or not finite."""
    estimate = state.loss.get(name)
    is_larger = estimate is not None and estimate.side is Side.ABOVE
    return is_larger or state.broken.get(name, 0) > 0


def _combine(found: SweepState, plan: SweepPlan) -> None:
    """Set the combinations: all faster variants together, and the fastest of them alone."""
    speed = found.variants.speed
    faster = [name for name, estimate in speed.items() if estimate.side is Side.ABOVE]
    faster.sort(key=lambda name: speed[name].effect or 0.0, reverse=True)
    joined = Combination((), {})
    for name in faster:
        together, refused = plan.combine(joined.changes, found.changes[name])
        if is_loss_worse(found.variants, name):
            found.left_out[name] = "its loss after equal steps is worse"
        elif refused is not None:
            found.left_out[name] = refused
        elif together == joined.changes:
            found.left_out[name] = "it is part of another one"
        else:
            joined = Combination((*joined.variants, name), together)
            if len(joined.variants) == 1:
                found.combinations.append(joined)
    if len(joined.variants) > 1:
        found.combinations.append(joined)


def _confirm(found: SweepState, plan: SweepPlan, trials: Sequence[Trial]) -> None:
    names = tuple(one.name for one in found.combinations)
    rounds = _confirming_rounds(plan, trials, 1 + len(names))
    # An end at the first significant look would bias the effect upwards.
    rules = Rules(looks=(rounds,), max_rounds=rounds)
    comparison = VariantComparison(SweepPhase.CONFIRM, BASELINE, names)
    state = replay_comparison(comparison, trials, rules, plan.seed)
    found.phase = SweepPhase.CONFIRM
    found.confirmed = state
    found.rules = rules
    found.next = state.next
    found.changes |= {one.name: one.changes for one in found.combinations}


def _budget_test(plan: SweepPlan, trials: Sequence[Trial]) -> Callable[[int, Sequence[str]], bool]:
    """Return a test of whether a round of the variants leaves the time of a confirmation."""

    def round_fits(number: int, names: Sequence[str]) -> bool:
        before = _before(trials, SweepPhase.VARIANTS, number)
        used_s = sum(one.seconds for one in before)
        needed_s = _expected_s(before, len(names) + _least_confirming(plan))
        return used_s + needed_s <= plan.budget_s

    return round_fits


def _confirming_rounds(plan: SweepPlan, trials: Sequence[Trial], count: int) -> int:
    """Return the rounds of a confirmation with `count` trials each, fixed before its first one."""
    before = _before(trials, SweepPhase.CONFIRM, 1)
    left_s = plan.budget_s - sum(one.seconds for one in before)
    round_s = _expected_s(before, count)
    least = min(MIN_CONFIRMING_ROUNDS, plan.max_rounds)
    return max(least, int(min(plan.max_rounds, left_s / round_s)))


def _least_confirming(plan: SweepPlan) -> int:
    """Return the number of trials of the shortest confirmation."""
    return min(MIN_CONFIRMING_ROUNDS, plan.max_rounds) * confirming_trials(plan)


def confirming_trials(plan: SweepPlan) -> int:
    """Return the maximum number of trials in a round of the confirmation."""
    return min(MAX_CONFIRMED, 1 + len(plan.runnable))


def _before(trials: Sequence[Trial], key: str, number: int) -> Sequence[Trial]:
    """Return the trials before the first one of a round."""
    for at, one in enumerate(trials):
        if (one.contest, one.round) == (key, number):
            return trials[:at]
    return trials


def _expected_s(before: Sequence[Trial], count: int) -> float:
    """Return the expected seconds of a number of trials, by the mean so far."""
    return count * statistics.fmean(one.seconds for one in before) if before else 0.0


def seconds_needed(plan: SweepPlan, first: Trial) -> float:
    """Return the seconds up to the first look and a confirmation, by the baseline's first trial."""
    steps = plan.steps + plan.warmup - (first.metrics.get("steps") or 0)
    each: float = first.seconds + max(0, steps) * first.metrics["step_time"]
    trials = min(plan.looks[0], plan.max_rounds) * (plan.baselines + len(plan.runnable))
    return first.seconds + each * (trials + _least_confirming(plan))
