"""The state of a sweep, from its plan and its trials: the next trial and its purpose. Pure.

All variants are compared with the baseline. Then the winners join the best combination, the largest
effect first, each after a comparison with the combination so far. The result is confirmed against
the baseline in fresh rounds, because the largest of many estimates is biased upwards. If the loss
of the combination is worse there, its last setting is removed. A time budget ends the rounds
earlier: a sweep is replayed from its trials, so each decision depends only on the trials before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from stepscope.lab.comparison import (
    ComparisonState,
    NextTrial,
    RoundFits,
    VariantComparison,
    replay_comparison,
)
from stepscope.lab.folder import Trial
from stepscope.lab.plan import COMPILE_S, SweepPlan
from stepscope.lab.statistics import Rules, Side
from stepscope.lab.verdict_text import of_loss

BASELINE = "baseline"
VARIANTS = "variants"
CONFIRM = "confirm"
COMBINE = "combine"
SCREENING = 0.5  # Fraction of the budget in which the variants are compared with the baseline.
MIN_CONFIRMING_ROUNDS = 5
NOT_DECIDED = "not decided within the time"


class SweepPhase(StrEnum):
    """The current phase of a sweep."""

    CALIBRATING = "calibrating"
    MEASURING = "measuring"
    COMBINING = "combining"
    CONFIRMING = "confirming"


@dataclass(frozen=True, slots=True)
class CombinationStep:
    """A combination that was tried: whether its last setting is kept, and why."""

    names: tuple[str, ...]
    kept: bool
    reason: str


@dataclass(slots=True)
class SweepState:
    """The state of a sweep; `next` is None at its end, and `failed` the reason of an error."""

    phase: SweepPhase
    variants: ComparisonState
    comparison: VariantComparison
    state: ComparisonState
    next: NextTrial | None = None
    tried: list[CombinationStep] = field(default_factory=list)
    winners: tuple[str, ...] = ()
    best: Mapping[str, Any] | None = None
    confirmed: ComparisonState | None = None
    changes: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of any name of `next`
    failed: str | None = None

    @property
    def open_round(self) -> tuple[str, int] | None:
        """Key and number of the incomplete round; None at the end of the sweep."""
        if self.next is not None:
            return self.next.contest, self.next.round
        return None if self.failed is None else (self.comparison.key, self.state.round)


def rules_of(plan: SweepPlan) -> Rules:
    return Rules(**{spec.name: getattr(plan, spec.name) for spec in fields(Rules)})


def confirming_rules(plan: SweepPlan, trials: Sequence[Trial], key: str) -> Rules:
    """Return the rules of the confirmation `key`: one look after a fixed number of rounds."""
    # An end at the first significant look would bias the effect upwards.
    rounds = confirming_rounds(plan, trials, key)
    return replace(rules_of(plan), looks=(rounds,), max_rounds=rounds)


def replay_sweep(plan: SweepPlan, trials: Sequence[Trial]) -> SweepState:
    """Return the state of a sweep after its trials."""
    variants = {
        variant.name: variant.changes for variant in plan.variants if variant.problem is None
    }
    comparison = VariantComparison(VARIANTS, BASELINE, tuple(variants), plan.baselines)
    fits = rounds_that_fit(plan, trials, VARIANTS, SCREENING)
    state = replay_comparison(comparison, trials, rules_of(plan), plan.seed, fits)
    if state.is_cut and not any(state.speed[name].side is Side.ABOVE for name in state.decided):
        # Nothing to combine yet: all of the budget but a confirmation is for these rounds.
        fits = rounds_that_fit(plan, trials, VARIANTS, 1.0)
        state = replay_comparison(comparison, trials, rules_of(plan), plan.seed, fits)
    found = SweepState(SweepPhase.MEASURING, state, comparison, state, state.next)
    found.changes = {name: {} for name in comparison.references} | variants
    if BASELINE in state.failed:
        found.failed = f"The baseline cannot be measured: {state.failed[BASELINE]}"
    elif state.next is None and plan.find_best:
        _combine(found, plan, trials)
    return found


def loss_is_worse(state: ComparisonState, name: str) -> bool:
    """Return True if a variant's loss is larger than the reference's, or not finite."""
    estimate = state.loss.get(name)
    worse = estimate is not None and estimate.side is Side.ABOVE
    return worse or state.broken.get(name, 0) > 0


def _combine(found: SweepState, plan: SweepPlan, trials: Sequence[Trial]) -> None:
    """Add the winners greedily and confirm the result; stop at the first missing trial."""
    speed = found.variants.speed
    winners = sorted(
        (name for name in found.changes if name in speed and speed[name].side is Side.ABOVE),
        key=lambda name: speed[name].effect or 0.0,
        reverse=True,
    )
    accepted: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []  # the last is the largest
    for name in winners:
        new = found.changes[name]
        names, changes = accepted[-1] if accepted else ((), {})
        together, refused = plan.combine(changes, new)
        kept: bool | None = False
        if loss_is_worse(found.variants, name):
            reason = "its loss after equal steps is worse"
            found.tried.append(CombinationStep((name,), False, reason))
        elif not accepted:
            kept = True
            found.tried.append(CombinationStep((name,), True, "the largest effect"))
        elif together == changes:
            found.tried.append(CombinationStep((*names, name), False, "it is part of another one"))
        elif refused is not None:
            found.tried.append(CombinationStep((*names, name), False, refused))
        else:
            kept = _challenge(found, plan, trials, (*names, name), changes, together)
        if kept is None:
            return
        if kept:
            accepted.append(((*names, name), together))
    _confirm(found, plan, trials, accepted)


def _challenge(
    found: SweepState,
    plan: SweepPlan,
    trials: Sequence[Trial],
    names: Sequence[str],
    before: Mapping[str, Any],
    together: Mapping[str, Any],
) -> bool | None:
    """Return whether the last setting makes the combination faster; None if trials are missing."""
    reference, challenger = " + ".join(names[:-1]), " + ".join(names)
    comparison = VariantComparison(f"{COMBINE} {challenger}", reference, (challenger,))
    fits = rounds_that_fit(plan, trials, comparison.key, 1.0)
    state = replay_comparison(comparison, trials, rules_of(plan), plan.seed, fits)
    found.phase, found.comparison, found.state = SweepPhase.COMBINING, comparison, state
    found.next = state.next
    found.changes |= {reference: before, challenger: together}
    if state.next is not None:
        return None
    failure = next(iter(state.failed.values()), None)
    kept = failure is None and state.speed[challenger].side is Side.ABOVE
    reason = "measured faster than the combination without it"
    if failure is not None:
        reason = f"it failed: {failure}"
    elif state.is_cut:
        kept, reason = False, NOT_DECIDED
    elif not kept:
        reason = "not measured faster than the combination without it"
    elif loss_is_worse(state, challenger):
        kept, reason = False, "the loss after equal steps is worse than without it"
    found.tried.append(CombinationStep(tuple(names), kept, reason))
    return kept


def _confirm(
    found: SweepState,
    plan: SweepPlan,
    trials: Sequence[Trial],
    accepted: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]],
) -> None:
    """Confirm the largest accepted combination or, if its loss is worse, the one before it."""
    key = CONFIRM
    for names, changes in reversed(accepted):
        best = " + ".join(names)
        comparison = VariantComparison(key, BASELINE, (best,))
        rules = confirming_rules(plan, trials, key)
        state = replay_comparison(comparison, trials, rules, plan.seed)
        found.phase, found.comparison, found.state = SweepPhase.CONFIRMING, comparison, state
        found.next = state.next
        found.changes[best] = changes
        if state.next is not None or not loss_is_worse(state, best):
            found.winners, found.best, found.confirmed = names, changes, state
            return
        reason = f"confirmed against the baseline, {of_loss(state, best)['text']}"
        found.tried = [
            CombinationStep(names, False, reason) if one.names == names else one
            for one in found.tried
        ]
        key = f"{CONFIRM} {' + '.join(names[:-1])}"


def seconds_needed(plan: SweepPlan, first: Trial) -> float:
    """Return the seconds up to the first look and a confirmation, by the baseline's first trial."""
    steps = plan.steps + plan.warmup - (first.metrics.get("steps") or 0)
    each: float = first.seconds + max(0, steps) * first.metrics["step_time"]
    runnable = [variant for variant in plan.variants if variant.problem is None]
    look = each * min(plan.looks[0], plan.max_rounds) * (plan.baselines + len(runnable))
    look += COMPILE_S * sum(plan.compiles(variant.changes) for variant in runnable)
    confirmation = 2 * each * _confirming_rounds_at_least(plan)
    return first.seconds + max(look / SCREENING, look + confirmation)


def rounds_that_fit(
    plan: SweepPlan, trials: Sequence[Trial], key: str, fraction: float
) -> RoundFits | None:
    """Return a test of whether a round fits in a fraction of the budget; None without a budget."""
    budget = plan.budget_s
    if budget is None:
        return None

    def fits(number: int, names: Sequence[str]) -> bool:
        before = _before(trials, key, number)
        spent = sum(one.seconds for one in before)
        reserve = _confirming_rounds_at_least(plan) * _pair_s(before)  # always remains
        return spent + _round_s(before, names) <= min(fraction * budget, budget - reserve)

    return fits


def confirming_rounds(plan: SweepPlan, trials: Sequence[Trial], key: str) -> int:
    """Return the number of rounds of the confirmation `key`, fixed before its first one."""
    budget = plan.budget_s
    if budget is None:
        return plan.max_rounds
    before = _before(trials, key, 1)
    pair = _pair_s(before)
    left = budget - sum(one.seconds for one in before)
    fitting = int(left / pair) if pair else plan.max_rounds
    return min(plan.max_rounds, max(_confirming_rounds_at_least(plan), fitting))


def _confirming_rounds_at_least(plan: SweepPlan) -> int:
    return min(MIN_CONFIRMING_ROUNDS, plan.max_rounds)


def _before(trials: Sequence[Trial], key: str, number: int) -> Sequence[Trial]:
    for at, one in enumerate(trials):
        if (one.contest, one.round) == (key, number):
            return trials[:at]
    return trials


def _round_s(before: Sequence[Trial], names: Sequence[str]) -> float:
    """Return the expected seconds of one trial of each name, by the trials so far."""
    took = _seconds(before)
    typical = statistics.median([one.seconds for one in before]) if before else 0.0
    return sum(statistics.fmean(took.get(name, [typical])) for name in names)


def _pair_s(before: Sequence[Trial]) -> float:
    """Return the seconds of a confirming round: twice those of the slowest variant."""
    measured = [one for one in before if one.ok]
    typical = statistics.median([one.seconds for one in measured]) if measured else 0.0
    # Other programs can make a single trial ten times longer.
    repeated = [took for took in _seconds(measured).values() if len(took) > 1]
    return 2 * max(typical, *map(statistics.median_low, repeated), 0.0)


def _seconds(trials: Sequence[Trial]) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {}
    for one in trials:
        took.setdefault(one.name, []).append(one.seconds)
    return took
