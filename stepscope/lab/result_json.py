"""Create the content of sweep.json from the plan and the trials. Pure; see docs/lab.md."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from stepscope.lab.comparison import NextTrial, VariantComparison
from stepscope.lab.folder import METRICS, Trial
from stepscope.lab.plan import SweepPlan, Variant
from stepscope.lab.sweep_state import (
    BASELINE,
    SweepPhase,
    SweepState,
    confirming_trials,
)
from stepscope.lab.verdict_text import impossible, verdict_json


def content(
    plan: SweepPlan, trials: Sequence[Trial], state: SweepState, *, over: bool
) -> dict[str, Any]:
    """Return the measured part of sweep.json. `over` is True unless the sweep is running."""
    of_variants = [one for one in trials if one.contest == SweepPhase.VARIANTS]
    references = VariantComparison(SweepPhase.VARIANTS, BASELINE, (), plan.baselines).references
    return {
        "workload": plan.workload,
        "plan": plan.to_dict(),
        "progress": _progress(plan, trials, state),
        "baseline": {
            "name": BASELINE,
            "label": plan.label,
            "rounds": sum(one.ok and one.name == BASELINE for one in of_variants),
            "metrics": _medians(of_variants, *references),
        },
        "variants": [
            _variant(plan, variant, of_variants, state, over=over) for variant in plan.variants
        ],
        "left_out": state.left_out,
        "best": _best(trials, state, over=over),
        "throttled": _throttled(trials),
    }


def _medians(trials: Iterable[Trial], *names: str) -> dict[str, float | None]:
    """Return the median of each metric over the trials of these names; None without a value."""
    taken = [one.metrics for one in trials if one.ok and one.name in names]
    found: dict[str, float | None] = {}
    for metric in METRICS:
        values = [one[metric] for one in taken if one.get(metric) is not None]
        found[metric] = statistics.median(values) if values else None
    return found


def _progress(plan: SweepPlan, trials: Sequence[Trial], state: SweepState) -> dict[str, Any]:
    """Return the progress; the seconds left are the maximum, None if unknown."""
    left = 0
    seconds: float | None = 0.0
    if state.next is not None:
        left = state.current.left
        is_open = state.phase is not SweepPhase.CONFIRM
        if is_open and plan.find_best and plan.rules.decision_rounds:
            left += confirming_trials(plan) * plan.max_rounds
        taken = [one.seconds for one in trials[-20:] if one.ok]
        used_s = sum(one.seconds for one in trials)
        seconds = left * statistics.fmean(taken) if taken else None
        if is_open and plan.budget_s < math.inf:  # the rounds of a confirmation are fixed
            seconds = plan.budget_s - used_s if plan.budget_s > used_s else None
    return {
        "done": len(trials),
        "total": len(trials) + left,
        "round": state.current.round,
        "doing": "done" if state.next is None else _doing(plan, state.phase, state.next),
        "seconds_left": seconds,
        "phase": state.phase,
    }


def _doing(plan: SweepPlan, phase: SweepPhase, trial: NextTrial) -> str:
    if phase is SweepPhase.CALIBRATE:
        return "a first trial of the baseline, to choose the number of steps"
    text = f"round {trial.round} of {plan.max_rounds}: {trial.name}"
    is_confirming = phase is SweepPhase.CONFIRM
    return f"confirming the best combination, {text}" if is_confirming else text


def _variant(
    plan: SweepPlan, variant: Variant, trials: Sequence[Trial], state: SweepState, *, over: bool
) -> dict[str, Any]:
    if variant.problem is not None:
        # Without the remedy, which is for the sidebar: "Turn it off".
        verdict = impossible(f"{variant.problem.field}: {variant.problem.reason}")
    else:
        over = over or state.confirmed is not None or state.next is None
        verdict = verdict_json(state.variants, variant.name, plan.rules, over=over)
    return {**asdict(variant), **verdict, "metrics": _medians(trials, variant.name)}


def _best(trials: Sequence[Trial], state: SweepState, *, over: bool) -> dict[str, Any] | None:
    confirmed, best, rules = state.confirmed, state.best, state.rules
    if confirmed is None or best is None or rules is None:
        return None
    over = over or state.next is None
    verdict = verdict_json(confirmed, best.name, rules, over=over)
    if BASELINE in confirmed.failed:
        verdict["reason"] = f"The baseline failed: {confirmed.failed[BASELINE]}"
    taken = [one for one in trials if one.contest == SweepPhase.CONFIRM]
    return {
        "variants": list(best.variants),
        "changes": dict(best.changes),
        **verdict,
        "metrics": _medians(taken, best.name),
        "baseline": _medians(taken, BASELINE),
    }


def _throttled(trials: Sequence[Trial]) -> str | None:
    """Return why and how often the device was throttled, as a sentence; None without it."""
    found = Counter(one.metrics["throttle"] for one in trials if one.metrics.get("throttle"))
    parts = [f"{reason} in {count} of {len(trials)} trials" for reason, count in found.items()]
    return f"The device was throttled: {'; '.join(parts)}." if parts else None


def finite(value: Any) -> Any:
    """Return JSON values with None for NaN and infinity."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=float))
