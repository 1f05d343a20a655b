"""The time budget of a sweep: which rounds still begin. Pure.

A sweep is replayed from its trials, so each decision depends only on the trials before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from stepscope.lab.comparison import RoundFits
from stepscope.lab.folder import Trial
from stepscope.lab.plan import COMPILE_S, SweepPlan

SCREENING = 0.5  # Fraction of the budget in which the variants are compared with the baseline.
MIN_CONFIRMING_ROUNDS = 5
NOT_DECIDED = "not decided within the time"


def seconds_needed(plan: SweepPlan, first: Trial) -> float:
    """Return the seconds up to the first look and a confirmation, by the baseline's first trial."""
    steps = plan.steps + plan.warmup - (first.metrics.get("steps") or 0)
    each: float = first.seconds + max(0, steps) * first.metrics["step_time"]
    runnable = [arm for arm in plan.arms if arm.problem is None]
    look = each * min(plan.looks[0], plan.max_rounds) * (plan.baselines + len(runnable))
    look += COMPILE_S * sum(plan.compiles(arm.changes) for arm in runnable)
    confirmation = 2 * each * _confirming_rounds_at_least(plan)
    return first.seconds + max(look / SCREENING, look + confirmation)


def rounds_that_fit(
    plan: SweepPlan, trials: Sequence[Trial], key: str, fraction: float
) -> RoundFits | None:
    """Return whether a round of a comparison fits in a fraction of the budget; None without one.

    The shortest confirmation always remains.
    """
    budget = plan.budget_s
    if budget is None:
        return None

    def fits(number: int, names: Sequence[str]) -> bool:
        before = _before(trials, key, number)
        spent = sum(one.seconds for one in before)
        reserve = _confirming_rounds_at_least(plan) * _pair_s(before)
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
    """Return the trials before a round of a comparison."""
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
    """Return the seconds of a confirming round: twice those of the slowest variant.

    Other programs can make a single trial ten times longer, so a variant needs two to be slow.
    """
    measured = [one for one in before if one.ok]
    typical = statistics.median([one.seconds for one in measured]) if measured else 0.0
    repeated = [took for took in _seconds(measured).values() if len(took) > 1]
    return 2 * max(typical, *map(statistics.median_low, repeated), 0.0)


def _seconds(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """Return the seconds of the trials by name."""
    took: dict[str, list[float]] = {}
    for one in trials:
        took.setdefault(one.name, []).append(one.seconds)
    return took
