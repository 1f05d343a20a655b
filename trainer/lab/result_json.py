"""Make the content of sweep.json of the plan and the trials. Pure; see docs/lab.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.config import RunConfig, Strategy
from trainer.lab.comparison import Trial, VariantComparison, of_contest
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
from trainer.lab.variants import changed
from trainer.lab.verdict_text import impossible, of_drift, verdict_json


def scaled(
    config: RunConfig, changes: Mapping[str, Any], verdict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `scaling` and the `text` with it, for an arm on another number of devices.

    Speed-up is the ratio of the samples per second of all devices together; efficiency is that per
    device. Both have the interval of the verdict. Empty for other arms.
    """
    arm = changed(config, changes)
    devices = _devices(arm) / _devices(config)
    if not {"strategy", "devices_per_node"} & changes.keys():
        return {}
    ends = [verdict["effect"], verdict["low"], verdict["high"]]
    if any(end is None for end in ends):
        return {"scaling": {"devices": _devices(arm), "speed_up": None, "efficiency": None}}
    speed, low, high = (1 + end for end in ends)
    efficient = [end / devices for end in (speed, low, high)]
    scaling = {
        "devices": _devices(arm),
        "speed_up": speed,
        "speed_up_low": low,
        "speed_up_high": high,
        "efficiency": efficient[0],
        "efficiency_low": efficient[1],
        "efficiency_high": efficient[2],
    }
    words = (
        f"{speed:.2f} times as fast [{low:.2f}, {high:.2f}], efficiency "
        f"{100 * efficient[0]:.0f} % [{100 * efficient[1]:.0f}, {100 * efficient[2]:.0f}]"
    )
    return {"scaling": scaling, "text": f"{verdict['text']}; {words}"}


def _devices(config: RunConfig) -> int:
    return 1 if config.strategy is Strategy.NONE else config.devices_per_node * config.num_nodes


CALIBRATE = "calibrate"
METRICS = (
    "samples_per_sec",
    "mean_samples_per_sec",
    "step_time",
    "data_wait",
    "h2d",
    "gpu_time",
    "peak_allocated",
    "peak_reserved",
    "peak_process",
    "energy_per_sample",
    "loss",
    "mfu",
)
OF_A_ROUND = (
    "samples_per_sec",
    "step_time",
    "loss",
    "sm_clock",
    "power",
    "throttle",
    "energy_per_sample",
)


def content(
    plan: SweepPlan, samples: Sequence[Trial], course: SweepState, *, over: bool
) -> dict[str, Any]:
    """Return the measured part of sweep.json. `over` is True unless the sweep is running."""
    of_arms = of_contest(samples, ARMS)
    return {
        "workload": str(plan.config.workload),
        "plan": plan.to_dict(),
        "progress": progress(plan, samples, course),
        "baseline": {
            "name": BASELINE,
            "label": label(plan.config),
            # The keys of an arm, for who reads all rows alike.
            **dict.fromkeys(("verdict", "effect", "low", "high", "resolution", "reason")),
            "rounds": sum(one.ok for one in of_arms if one.name == BASELINE),
            "metrics": medians(
                of_arms, *VariantComparison(ARMS, BASELINE, (), plan.baselines).references
            ),
        },
        "arms": [_arm(plan, index, of_arms, course, over=over) for index in range(len(plan.arms))],
        "combining": [
            {"tried": list(one.names), "kept": one.kept, "reason": one.reason}
            for one in course.tried
        ],
        "best": _best(plan, samples, course, over=over),
        "drift": _drift(of_arms),
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
    left = 0 if course.standing is None or course.next is None else course.standing.left
    decides = plan.find_best and bool(rules_of(plan).judged_after)
    if course.next is not None and decides and course.phase is not SweepPhase.CONFIRMING:
        left += 2 * plan.max_rounds  # the confirmation, at most; how long the search is shows later
    each = [one.seconds for one in samples[-20:] if one.ok]
    upcoming = course.next
    return {
        "done": len(samples),
        "total": len(samples) + left,
        "round": 0 if course.standing is None else course.standing.round,
        "doing": "done" if upcoming is None else doing(plan, course),
        "seconds_left": left * statistics.fmean(each) if each else None,
        "phase": course.phase,
    }


def doing(plan: SweepPlan, course: SweepState) -> str:
    """Return the sample under way in words."""
    assert course.next is not None
    start = f"round {course.next.round} of {plan.max_rounds}"
    if course.phase is SweepPhase.CALIBRATING:
        return "a first sample of the baseline, to choose the number of steps"
    name = course.next.name
    if course.phase is SweepPhase.CONFIRMING:
        return f"confirming the best combination, {start}: {name}"
    return f"{'combining, ' if course.phase is SweepPhase.COMBINING else ''}{start}: {name}"


def _arm(
    plan: SweepPlan, index: int, samples: Sequence[Trial], course: SweepState, *, over: bool
) -> dict[str, Any]:
    arm = plan.arms[index]
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
    assert course.contest is not None
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


def _drift(samples: Sequence[Trial]) -> dict[str, Any] | None:
    rates = [one.metrics["samples_per_sec"] for one in samples if one.ok and one.name == BASELINE]
    change = rates[-1] / rates[0] - 1 if rates else None
    return of_drift(drift(rates), change)


def _rounds(samples: Sequence[Trial]) -> Iterable[dict[str, Any]]:
    """Yield each round with its samples in the order in which they were taken."""
    found: dict[tuple[str, int], list[Trial]] = {}
    for one in samples:
        if one.contest != CALIBRATE:
            found.setdefault((one.contest, one.round), []).append(one)
    for (contest, number), taken in found.items():
        yield {
            "round": number,
            "phase": _phase(contest),
            "contest": contest,
            "order": list(dict.fromkeys(one.name for one in taken)),
            "samples": {
                one.name: {
                    **_of_a_round(one),
                    "failures": [
                        two.reason for two in taken if two.name == one.name and not two.ok
                    ],
                }
                for one in taken
            },
        }


def _of_a_round(sample: Trial) -> dict[str, Any]:
    values: Mapping[str, Any] = {name: sample.metrics.get(name) for name in OF_A_ROUND}
    return {**values, "seconds": sample.seconds, "reason": sample.reason}


def _phase(contest: str) -> SweepPhase:
    if contest.startswith(CONFIRM):
        return SweepPhase.CONFIRMING
    return SweepPhase.COMBINING if contest.startswith(COMBINE) else SweepPhase.MEASURING


def finite(value: Any) -> Any:
    """Return JSON values with None for what is no finite number, which JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
