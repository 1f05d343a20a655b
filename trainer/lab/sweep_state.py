"""The course of a sweep, from its plan and its samples: what is measured next, and why. Pure.

All arms against the baseline, then the search for the best combination: the winners join it one by
one, the largest first, each in a contest of its own against the combination so far. What remains is
confirmed against the baseline with fresh rounds, because the largest of many effects was also the
luckiest. A combination whose loss is worse there loses the setting that joined it last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from trainer.config import ConfigError, RunConfig
from trainer.config_validation import TrainDevice, validate
from trainer.lab.comparison import ComparisonState, NextTrial, VariantComparison, replay_comparison
from trainer.lab.plan import SweepPlan
from trainer.lab.statistics import Rules, Side
from trainer.lab.trial_log import Trial
from trainer.lab.variants import changed, own_changes, own_with
from trainer.lab.verdict_text import of_loss

BASELINE = "baseline"
ARMS = "arms"
CONFIRM = "confirm"
COMBINE = "combine"


class SweepPhase(StrEnum):
    """What a sweep does at the moment."""

    CALIBRATING = "calibrating"
    MEASURING = "measuring"
    COMBINING = "combining"
    CONFIRMING = "confirming"


@dataclass(frozen=True, slots=True)
class CombinationStep:
    """A winner that was added to the combination: whether it stays in it, and why."""

    names: tuple[str, ...]
    kept: bool
    reason: str


@dataclass(slots=True)
class SweepState:
    """Where a sweep stands; `next` is None when it has ended, by `failed` if that is set.

    `changes` are those of every name that `next` may have.
    """

    phase: SweepPhase
    arms: ComparisonState
    contest: VariantComparison
    standing: ComparisonState
    next: NextTrial | None = None
    tried: list[CombinationStep] = field(default_factory=list)
    winners: tuple[str, ...] = ()
    best: Mapping[str, Any] | None = None
    confirmed: ComparisonState | None = None
    changes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: str | None = None

    @property
    def open_round(self) -> tuple[str, int] | None:
        """Contest and number of the round that is not yet whole; None where the sweep is over."""
        if self.next is not None:
            return self.next.contest, self.next.round
        return None if self.failed is None else (self.contest.key, self.standing.round)


def rules_of(plan: SweepPlan) -> Rules:
    """Return the numbers of the recipe that the plan has."""
    return Rules(**{spec.name: getattr(plan, spec.name) for spec in fields(Rules)})


def confirming_rules(plan: SweepPlan) -> Rules:
    """Return the rules of the confirmation: all rounds, then one look at the full alpha.

    One that ended at the first significant look would print the larger of many estimates.
    """
    return replace(rules_of(plan), looks=(plan.max_rounds,))


def replay_sweep(
    plan: SweepPlan, samples: Sequence[Trial], devices: Sequence[TrainDevice]
) -> SweepState:
    """Play the sweep again from its samples; return where it stands."""
    arms = [arm for arm in plan.arms if arm.problem is None]
    contest = VariantComparison(ARMS, BASELINE, tuple(arm.name for arm in arms), plan.baselines)
    standing = replay_comparison(contest, samples, rules_of(plan), plan.seed)
    found = SweepState(SweepPhase.MEASURING, standing, contest, standing, standing.next)
    found.changes = {name: {} for name in contest.references}
    found.changes |= {arm.name: arm.changes for arm in arms}
    if BASELINE in standing.failed:
        found.failed = f"The baseline cannot be measured: {standing.failed[BASELINE]}"
    elif standing.next is None and plan.find_best:
        _combine(found, plan, samples, devices)
    return found


def loss_is_worse(standing: ComparisonState, name: str) -> bool:
    """Say whether an arm reached a larger loss than its reference, or one that is no number."""
    finding = standing.loss.get(name)
    worse = finding is not None and finding.side is Side.ABOVE
    return worse or standing.broken.get(name, 0) > 0


def _combine(
    found: SweepState, plan: SweepPlan, samples: Sequence[Trial], devices: Sequence[TrainDevice]
) -> None:
    """Add the winners greedily and confirm what remains; stops at the first missing sample."""
    speed = found.arms.speed
    winners = sorted(
        (name for name in found.changes if name in speed and speed[name].side is Side.ABOVE),
        key=lambda name: speed[name].effect or 0.0,
        reverse=True,
    )
    # The combinations that stood, the last one the largest.
    stood: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
    for name in winners:
        if loss_is_worse(found.arms, name):
            why = "its loss after equal steps is worse"
            found.tried.append(CombinationStep((name,), False, why))
            continue
        if not stood:
            stood.append(((name,), found.changes[name]))
            found.tried.append(CombinationStep((name,), True, "the largest effect"))
            continue
        names, changes = stood[-1]
        together = merged(plan.config, changes, found.changes[name])
        refused = _refused(changes, found.changes[name], plan.config, together, devices)
        if refused is not None:
            found.tried.append(CombinationStep((*names, name), False, refused))
            continue
        kept = _challenge(found, plan, samples, (*names, name), changes, together)
        if kept is None:
            return
        if kept:
            stood.append(((*names, name), together))
    _confirm(found, plan, samples, stood)


def merged(
    config: RunConfig, first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, Any]:
    """Return both changes of a baseline at once; the settings of a user's own workload add up."""
    together = {**first, **second}
    switched: dict[str, bool] = {}
    for change in (first, second):
        switched |= own_changes(config, change.get("custom_options", config.custom_options))
    if "custom_options" in together:
        together["custom_options"] = own_with(config, switched)
    return together


def _refused(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    config: RunConfig,
    together: Mapping[str, Any],
    devices: Sequence[TrainDevice],
) -> str | None:
    """Say why two arms cannot be combined; None where they can."""
    for name, value in second.items():
        if name != "custom_options" and name in first and first[name] != value:
            return f"{name} is {first[name]} in the combination already"
    try:
        problem = next(iter(validate(changed(config, together), devices)), None)
    except ConfigError as error:
        problem = error.problem
    return None if problem is None else f"{problem.field}: {problem.reason}"


def _challenge(
    found: SweepState,
    plan: SweepPlan,
    samples: Sequence[Trial],
    names: Sequence[str],
    before: Mapping[str, Any],
    together: Mapping[str, Any],
) -> bool | None:
    """Compare the combination so far with one more; None while samples are missing."""
    reference, challenger = " + ".join(names[:-1]), " + ".join(names)
    contest = VariantComparison(f"{COMBINE} {challenger}", reference, (challenger,))
    standing = replay_comparison(contest, samples, rules_of(plan), plan.seed)
    found.phase, found.contest, found.standing = SweepPhase.COMBINING, contest, standing
    found.changes |= {reference: before, challenger: together}
    found.next = standing.next
    if standing.next is not None:
        return None
    failure = next(iter(standing.failed.values()), None)
    kept = failure is None and standing.speed[challenger].side is Side.ABOVE
    reason = "measured faster than the combination without it"
    if failure is not None:
        reason = f"it failed: {failure}"
    elif not kept:
        reason = "not measured faster than the combination without it"
    elif loss_is_worse(standing, challenger):
        kept, reason = False, "the loss after equal steps is worse than without it"
    found.tried.append(CombinationStep(tuple(names), kept, reason))
    return kept


def _confirm(
    found: SweepState,
    plan: SweepPlan,
    samples: Sequence[Trial],
    stood: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]],
) -> None:
    """Compare the last combination that stood with the baseline.

    Where its loss is worse, it goes on with the one before; `best` stays None where none is left.
    """
    key = CONFIRM
    for names, changes in reversed(stood):
        best = " + ".join(names)
        contest = VariantComparison(key, BASELINE, (best,))
        standing = replay_comparison(contest, samples, confirming_rules(plan), plan.seed)
        found.phase, found.contest, found.standing = SweepPhase.CONFIRMING, contest, standing
        found.changes[best] = changes
        found.next = standing.next
        if standing.next is not None or not loss_is_worse(standing, best):
            found.winners, found.best, found.confirmed = names, changes, standing
            return
        reason = f"confirmed against the baseline, {of_loss(standing, best)['text']}"
        found.tried = [
            CombinationStep(names, False, reason) if one.names == names else one
            for one in found.tried
        ]
        key = f"{CONFIRM} {' + '.join(names[:-1])}"
