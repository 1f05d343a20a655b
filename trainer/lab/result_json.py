"""Make the content of sweep.json of the plan and the trials. Pure; see docs/lab.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trainer.config import RunConfig, Strategy
from trainer.lab.comparison import NextTrial, VariantComparison, of_contest
from trainer.lab.plan import SweepPlan
from trainer.lab.statistics import drift
from trainer.lab.sweep_state import (
    ARMS,
    BASELINE,
    COMBINE,
    CONFIRM,
    SweepPhase,
    SweepState,
    confirming_rules,
    rules_of,
)
from trainer.lab.trial_log import METRICS, Trial
from trainer.lab.variants import Variant, changed
from trainer.lab.verdict_text import impossible, of_drift, verdict_json


def scaled(
    config: RunConfig, changes: Mapping[str, Any], verdict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `scaling` and the `text` with it, for an arm on another number of devices.

    Speed-up is the ratio of the samples per second of all devices together; efficiency is that per
    device. Both have the interval of the verdict. Empty for other arms.
    """
    if not {"strategy", "devices_per_node"} & changes.keys():
        return {}
    count = _devices(changed(config, changes))
    devices = count / _devices(config)
    ends = [verdict["effect"], verdict["low"], verdict["high"]]
    if any(end is None for end in ends):
        return {"scaling": {"devices": count, "speed_up": None, "efficiency": None}}
    speed, low, high = (1 + end for end in ends)
    percents = [100 * end / devices for end in (speed, low, high)]
    scaling: dict[str, float] = {"devices": count}
    for suffix, end in (("", speed), ("_low", low), ("_high", high)):
        scaling[f"speed_up{suffix}"], scaling[f"efficiency{suffix}"] = end, end / devices
    words = (
        f"{speed:.2f} times as fast [{low:.2f}, {high:.2f}], efficiency "
        f"{percents[0]:.0f} % [{percents[1]:.0f}, {percents[2]:.0f}]"
    )
    return {"scaling": scaling, "text": f"{verdict['text']}; {words}"}


def _devices(config: RunConfig) -> int:
    return 1 if config.strategy is Strategy.NONE else config.devices_per_node * config.num_nodes


CALIBRATE = "calibrate"
_PHASES = {CONFIRM: SweepPhase.CONFIRMING, COMBINE: SweepPhase.COMBINING}
OF_A_ROUND = (
    *("samples_per_sec", "step_time", "loss", "sm_clock", "power", "throttle"),
    "energy_per_sample",
)


def content(
    plan: SweepPlan, samples: Sequence[Trial], course: SweepState, *, over: bool
) -> dict[str, Any]:
    """Return the measured part of sweep.json. `over` is True unless the sweep is running."""
    of_arms = of_contest(samples, ARMS)
    baseline = [one for one in of_arms if one.ok and one.name == BASELINE]
    rates = [one.metrics["samples_per_sec"] for one in baseline]
    references = VariantComparison(ARMS, BASELINE, (), plan.baselines).references
    return {
        "workload": str(plan.config.workload),
        "plan": plan.to_dict(),
        "progress": progress(plan, samples, course),
        "baseline": {
            "name": BASELINE,
            "label": label(plan.config),
            # The keys of an arm, for who reads all rows alike.
            **dict.fromkeys(("verdict", "effect", "low", "high", "resolution", "reason")),
            "rounds": len(baseline),
            "metrics": medians(of_arms, *references),
        },
        "arms": [_arm(plan, arm, of_arms, course, over=over) for arm in plan.arms],
        "combining": [
            {"tried": list(one.names), "kept": one.kept, "reason": one.reason}
            for one in course.tried
        ],
        "best": _best(plan, samples, course, over=over),
        "drift": of_drift(drift(rates), rates[-1] / rates[0] - 1 if rates else None),
        "rounds": list(_rounds(samples)),
    }


def label(config: RunConfig) -> str:
    """Return the baseline in a few words."""
    device = "CPU" if config.device == "cpu" else "GPU"
    return f"{config.workload} on {device}, {config.precision}, batch_size {config.batch_size}"


def medians(samples: Iterable[Trial], *names: str) -> dict[str, float | None]:
    """Return the median of each metric over the samples of these names; None without a value."""
    taken = [one.metrics for one in samples if one.ok and one.name in names]
    found: dict[str, float | None] = {}
    for metric in METRICS:
        values = [one[metric] for one in taken if one.get(metric) is not None]
        found[metric] = statistics.median(values) if values else None
    return found


def progress(plan: SweepPlan, samples: Sequence[Trial], course: SweepState) -> dict[str, Any]:
    """Return how far the sweep is; the seconds left are the most that it may take."""
    left = course.standing.left if course.next is not None else 0
    decides = plan.find_best and bool(rules_of(plan).judged_after)
    if course.next is not None and decides and course.phase is not SweepPhase.CONFIRMING:
        left += 2 * plan.max_rounds  # the confirmation, at most; how long the search is shows later
    each = [one.seconds for one in samples[-20:] if one.ok]
    return {
        "done": len(samples),
        "total": len(samples) + left,
        "round": course.standing.round,
        "doing": "done" if course.next is None else doing(plan, course, course.next),
        "seconds_left": left * statistics.fmean(each) if each else None,
        "phase": course.phase,
    }


def doing(plan: SweepPlan, course: SweepState, asked: NextTrial) -> str:
    """Return the sample under way in words."""
    if course.phase is SweepPhase.CALIBRATING:
        return "a first sample of the baseline, to choose the number of steps"
    text = f"round {asked.round} of {plan.max_rounds}: {asked.name}"
    if course.phase is SweepPhase.CONFIRMING:
        return f"confirming the best combination, {text}"
    return f"combining, {text}" if course.phase is SweepPhase.COMBINING else text


def _arm(
    plan: SweepPlan, arm: Variant, samples: Sequence[Trial], course: SweepState, *, over: bool
) -> dict[str, Any]:
    if arm.problem is not None:
        # Without the remedy, which speaks to one who wants the setting: "switch it off".
        verdict = impossible(f"{arm.problem.field}: {arm.problem.reason}")
    else:
        ended = over or course.phase is not SweepPhase.MEASURING or course.next is None
        verdict = verdict_json(course.arms, arm.name, rules_of(plan), over=ended)
        verdict |= scaled(plan.config, arm.changes, verdict)
    return {**arm.to_dict(), **verdict, "metrics": medians(samples, arm.name)}


def _best(
    plan: SweepPlan, samples: Sequence[Trial], course: SweepState, *, over: bool
) -> dict[str, Any] | None:
    if course.confirmed is None or course.best is None:
        return None
    ended = over or course.next is None
    name = " + ".join(course.winners)
    verdict = verdict_json(course.confirmed, name, confirming_rules(plan), over=ended)
    if BASELINE in course.confirmed.failed:
        verdict["reason"] = f"The baseline failed: {course.confirmed.failed[BASELINE]}"
    return {
        "arms": list(course.winners),
        "changes": dict(course.best),
        **verdict,
        "metrics": medians(of_contest(samples, course.contest.key), name),
    }


def _rounds(samples: Sequence[Trial]) -> Iterable[dict[str, Any]]:
    """Yield each round with its samples in the order in which they were taken."""
    found: dict[tuple[str, int], list[Trial]] = {}
    for one in samples:
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
                    **{name: one.metrics.get(name) for name in OF_A_ROUND},
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
