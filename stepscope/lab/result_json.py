"""Create the content of sweep.json from the plan and the trials. Pure; see docs/lab.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from stepscope.lab.comparison import NextTrial, VariantComparison, of_contest
from stepscope.lab.folder import METRICS, Trial
from stepscope.lab.plan import SweepPlan, Variant
from stepscope.lab.statistics import drift
from stepscope.lab.sweep_state import (
    BASELINE,
    COMBINE,
    CONFIRM,
    NOT_DECIDED,
    VARIANTS,
    SweepPhase,
    SweepState,
    confirming_rules,
    rules_of,
)
from stepscope.lab.verdict_text import impossible, of_drift, verdict_json

CALIBRATE = "calibrate"
_PHASES = {CONFIRM: SweepPhase.CONFIRMING, COMBINE: SweepPhase.COMBINING}
_OF_A_ROUND = (
    *("samples_per_sec", "step_time", "loss", "sm_clock", "power", "throttle"),
    "energy_per_sample",
)


def content(
    plan: SweepPlan, trials: Sequence[Trial], state: SweepState, *, over: bool
) -> dict[str, Any]:
    """Return the measured part of sweep.json. `over` is True unless the sweep is running."""
    of_variants = of_contest(trials, VARIANTS)
    baseline = [one for one in of_variants if one.ok and one.name == BASELINE]
    rates = [one.metrics["samples_per_sec"] for one in baseline]
    references = VariantComparison(VARIANTS, BASELINE, (), plan.baselines).references
    return {
        "workload": plan.workload,
        "plan": plan.to_dict(),
        "progress": _progress(plan, trials, state),
        "baseline": {
            "name": BASELINE,
            "label": plan.label,
            # The keys of a variant, so that all rows are alike.
            **dict.fromkeys(("verdict", "effect", "low", "high", "resolution", "reason")),
            "rounds": len(baseline),
            "metrics": _medians(of_variants, *references),
        },
        "variants": [
            _variant(plan, variant, of_variants, state, over=over) for variant in plan.variants
        ],
        "combining": [
            {"tried": list(one.names), "kept": one.kept, "reason": one.reason}
            for one in state.tried
        ],
        "best": _best(plan, trials, state, over=over),
        "drift": of_drift(drift(rates), rates[-1] / rates[0] - 1 if rates else None),
        "rounds": list(_rounds(trials)),
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
    """Return the progress; the seconds left are the maximum."""
    left = state.state.left if state.next is not None else 0
    decides = plan.find_best and bool(rules_of(plan).decision_rounds)
    if state.next is not None and decides and state.phase is not SweepPhase.CONFIRMING:
        left += 2 * plan.max_rounds  # of the confirmation; the combination search is unknown
    each = [one.seconds for one in trials[-20:] if one.ok]
    seconds = left * statistics.fmean(each) if each else None
    if plan.budget_s is not None and state.next is not None:
        seconds = max(0.0, plan.budget_s - sum(one.seconds for one in trials))
    return {
        "done": len(trials),
        "total": len(trials) + left,
        "round": state.state.round,
        "doing": "done" if state.next is None else _doing(plan, state.phase, state.next),
        "seconds_left": seconds,
        "phase": state.phase,
    }


def _doing(plan: SweepPlan, phase: SweepPhase, trial: NextTrial) -> str:
    if phase is SweepPhase.CALIBRATING:
        return "a first trial of the baseline, to choose the number of steps"
    text = f"round {trial.round} of {plan.max_rounds}: {trial.name}"
    if phase is SweepPhase.CONFIRMING:
        return f"confirming the best combination, {text}"
    return f"combining, {text}" if phase is SweepPhase.COMBINING else text


def _variant(
    plan: SweepPlan, variant: Variant, trials: Sequence[Trial], state: SweepState, *, over: bool
) -> dict[str, Any]:
    if variant.problem is not None:
        # Without the remedy, which is for the sidebar: "Turn it off".
        verdict = impossible(f"{variant.problem.field}: {variant.problem.reason}")
    else:
        ended = over or state.phase is not SweepPhase.MEASURING or state.next is None
        verdict = verdict_json(state.variants, variant.name, rules_of(plan), over=ended)
        verdict |= plan.scaling(variant.changes, verdict)
        if state.variants.is_cut and verdict["verdict"] == "undecided":
            verdict["reason"] = NOT_DECIDED
    return {**asdict(variant), **verdict, "metrics": _medians(trials, variant.name)}


def _best(
    plan: SweepPlan, trials: Sequence[Trial], state: SweepState, *, over: bool
) -> dict[str, Any] | None:
    if state.confirmed is None or state.best is None:
        return None
    name = " + ".join(state.winners)
    ended = over or state.next is None
    rules = confirming_rules(plan, trials, state.comparison.key)
    verdict = verdict_json(state.confirmed, name, rules, over=ended)
    if BASELINE in state.confirmed.failed:
        verdict["reason"] = f"The baseline failed: {state.confirmed.failed[BASELINE]}"
    return {
        "variants": list(state.winners),
        "changes": dict(state.best),
        **verdict,
        "metrics": _medians(of_contest(trials, state.comparison.key), name),
        "baseline": _medians(of_contest(trials, state.comparison.key), BASELINE),
    }


def _rounds(trials: Sequence[Trial]) -> Iterable[dict[str, Any]]:
    found: dict[tuple[str, int], list[Trial]] = {}
    for one in trials:
        if one.contest != CALIBRATE:
            found.setdefault((one.contest, one.round), []).append(one)
    for (contest, number), taken in found.items():
        yield {
            "round": number,
            "phase": _PHASES.get(contest.split(" ")[0], SweepPhase.MEASURING),
            "contest": contest,
            "order": list(dict.fromkeys(one.name for one in taken)),
            "samples": {
                one.name: {
                    **{name: one.metrics.get(name) for name in _OF_A_ROUND},
                    "seconds": one.seconds,
                    "reason": one.reason,
                    "failures": [
                        two.reason for two in taken if two.name == one.name and not two.ok
                    ],
                }
                for one in taken
            },
        }


def finite(value: Any) -> Any:
    """Return JSON values with None for NaN and infinity."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=float))
