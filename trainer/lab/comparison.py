"""One comparison over rounds: which sample comes next, and how each challenger stands. Pure.

A sweep has one contest of all arms against the baseline, one for each setting that may join the
best combination, and one that confirms it. All that a contest knows it reads from the samples, so
a sweep resumes by reading them again.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.lab.statistics import (
    EffectEstimate,
    Rules,
    Side,
    judge,
    judge_loss,
    log_ratios,
    loss_differences,
)
from trainer.lab.trial_log import Trial

TRIES = 2  # Failed attempts at one sample after which its arm has failed.
FAILURES = 3  # Failed attempts in all rounds after which a challenger has failed.
RATE, MEAN_RATE = "samples_per_sec", "mean_samples_per_sec"
Pairs = list[tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Metrics of the reference and of a challenger, a pair a round."""


@dataclass(frozen=True, slots=True)
class NextTrial:
    """The sample to take next."""

    contest: str
    round: int
    name: str


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """A reference and its challengers, by name; `key` names the contest in samples.jsonl.

    Each round runs the reference `runs` times.
    """

    key: str
    reference: str
    challengers: tuple[str, ...]
    runs: int = 1

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the reference's samples in a round: "baseline", "baseline 2", …"""
        return (self.reference, *(f"{self.reference} {run}" for run in range(2, self.runs + 1)))


@dataclass(slots=True)
class ComparisonState:
    """How a contest stands; `next` is None once nothing is left to measure.

    `left` is the largest number of samples that may still come, should no one be decided.
    `speed` and `loss` have a finding for each challenger, the last one it was judged by.
    `broken` says in how many rounds a challenger's loss was no finite number while the reference's
    was. `mean_effect` has their effects by the mean rate over all steps, in which stalls count.
    `failed` holds the reasons of those that could not be measured, the reference among them.
    `flaky` says of each whose process failed how often it did, also where another attempt measured.
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
    flaky: dict[str, str] = field(default_factory=dict)


def of_contest(samples: Iterable[Trial], contest: str) -> list[Trial]:
    """Return the samples of one contest, in order."""
    return [sample for sample in samples if sample.contest == contest]


def replay_comparison(
    contest: VariantComparison, samples: Sequence[Trial], rules: Rules, seed: int
) -> ComparisonState:
    """Play the contest again from its samples; return where it stands."""
    taken = of_contest(samples, contest.key)
    standing = ComparisonState()
    standing.flaky = {name: text for name in contest.challengers if (text := _flaky(taken, name))}
    still = list(contest.challengers)
    for number in range(1, rules.max_rounds + 1):
        standing.round = number
        names = round_order(contest, still, number, seed)
        for place, name in enumerate(names):
            attempts = [one for one in taken if (one.round, one.name) == (number, name)]
            if any(one.ok for one in attempts):
                continue
            is_reference = name in contest.references
            failures = sum(not one.ok for one in taken if one.name == name)
            too_often = not is_reference and failures >= FAILURES
            if len(attempts) < TRIES and not too_often:
                standing.next = NextTrial(contest.key, number, name)
                standing.left = len(names) - place + (rules.max_rounds - number) * len(names)
                break
            standing.failed[contest.reference if is_reference else name] = (
                standing.flaky[name] if too_often else attempts[-1].reason or "It gives no reason."
            )
        if standing.next is not None or contest.reference in standing.failed:
            break
        still = [name for name in still if name not in standing.failed]
        if number in rules.judged_after:
            _judge(standing, _pairs(contest, taken, number), still, rules, decides=True)
            still = [name for name in still if name not in standing.decided]
        if not still:
            break
    pairs = _pairs(contest, taken, rules.max_rounds)
    open_still = [name for name in still if name not in standing.failed]
    _judge(standing, pairs, open_still, rules, decides=False)
    for name in standing.speed:
        if (mean := _mean_effect(pairs[name])) is not None:
            standing.mean_effect[name] = mean
    return standing


def _flaky(samples: Sequence[Trial], name: str) -> str | None:
    """Return how many processes of a setting failed, and how the last of them did."""
    failed = [one for one in samples if one.name == name and not one.ok]
    if not failed:
        return None
    count = sum(one.name == name for one in samples)
    return f"{len(failed)} of {count} processes failed: {failed[-1].reason}"


def round_order(
    contest: VariantComparison, still: Sequence[str], number: int, seed: int
) -> list[str]:
    """Return the reference's runs and the remaining challengers in a round's random order."""
    names = [*contest.references, *still]
    random.Random(f"{seed}/{contest.key}/{number}").shuffle(names)
    return names


def _pairs(contest: VariantComparison, samples: Sequence[Trial], last: int) -> dict[str, Pairs]:
    """Return the metrics of the reference and each challenger in the rounds up to `last`."""
    ok = [one for one in samples if one.ok and one.round <= last]
    runs: dict[int, list[Mapping[str, Any]]] = {}
    for one in ok:
        if one.name in contest.references:
            runs.setdefault(one.round, []).append(one.metrics)
    reference = {number: _combined(of_round) for number, of_round in runs.items()}
    found: dict[str, Pairs] = {name: [] for name in contest.challengers}
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
    """Return the effect by the mean rates, a fraction; None where a round has none."""
    rates = [(a.get(MEAN_RATE) or 0.0, b.get(MEAN_RATE) or 0.0) for a, b in pairs]
    if not rates or min(map(min, rates)) <= 0:
        return None
    return math.expm1(statistics.fmean(log_ratios(rates)))


def _judge(
    standing: ComparisonState,
    pairs: Mapping[str, Pairs],
    names: Sequence[str],
    rules: Rules,
    *,
    decides: bool,
) -> None:
    """Judge these challengers with what is measured of all; between looks speed stays open."""
    ratios = {
        name: log_ratios([(a[RATE], b[RATE]) for a, b in found]) for name, found in pairs.items()
    }
    speed = judge(ratios, rules)
    for name in names:
        standing.speed[name] = speed[name] if decides else replace(speed[name], side=Side.OPEN)
        if standing.speed[name].side is not Side.OPEN:
            standing.decided.add(name)
        losses = [(_loss(a), _loss(b)) for a, b in pairs[name]]
        finite = [(a, b) for a, b in losses if a is not None and b is not None]
        standing.loss[name] = judge_loss(loss_differences(finite) if finite else [], rules)
        standing.broken[name] = sum(
            _loss(a) is not None and _loss(b) is None and not b["loss_finite"]
            for a, b in pairs[name]
        )
