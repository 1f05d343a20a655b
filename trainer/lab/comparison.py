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
from dataclasses import dataclass, field
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

TRIES = 2
"""Failed attempts at one sample after which its arm has failed."""
FAILURES = 3
"""Failed attempts in all rounds after which a challenger has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One child process and what it measured, or the `reason` why it measured nothing.

    `seconds` is the wall time of the whole process; `metrics` are those of docs/lab.md. `session`
    counts how often the sweep had been resumed.
    """

    contest: str
    round: int
    name: str
    reason: str | None = None
    seconds: float = 0.0
    ended: float = 0.0
    session: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True where it measured something."""
        return self.reason is None


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
    standing, rounds = ComparisonState(), _Rounds(taken, contest)
    standing.flaky = {
        name: flaky for name in contest.challengers if (flaky := _flaky(taken, name)) is not None
    }
    still = list(contest.challengers)
    for number in range(1, rules.max_rounds + 1):
        standing.round = number
        names = round_order(contest, still, number, seed)
        for place, name in enumerate(names):
            attempts = [one for one in taken if (one.round, one.name) == (number, name)]
            if any(one.ok for one in attempts):
                continue
            is_reference = name in contest.references
            too_often = not is_reference and _failures(taken, name) >= FAILURES
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
            _look(standing, rounds.until(number), still, rules)
            still = [name for name in still if name not in standing.decided]
        if not still:
            break
    _look_between(standing, rounds, still, rules)
    for name in standing.speed:
        mean = rounds.mean_effect(name)
        if mean is not None:
            standing.mean_effect[name] = mean
    return standing


def _failures(samples: Sequence[Trial], name: str) -> int:
    return sum(not one.ok for one in samples if one.name == name)


def _flaky(samples: Sequence[Trial], name: str) -> str | None:
    """Say how many processes of a setting failed, and how the last of them did."""
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


class _Rounds:
    """The measured values by round: of throughput, and of the loss."""

    def __init__(self, samples: Sequence[Trial], contest: VariantComparison) -> None:
        self.contest = contest
        self._ok = [one for one in samples if one.ok]
        runs: dict[int, list[Mapping[str, Any]]] = {}
        for one in self._ok:
            if one.name in contest.references:
                runs.setdefault(one.round, []).append(one.metrics)
        self._reference = {number: _combined(of_round) for number, of_round in runs.items()}

    def until(self, last: int) -> _Rounds:
        """Return those of the first rounds."""
        return _Rounds([one for one in self._ok if one.round <= last], self.contest)

    def speeds(self, name: str) -> list[tuple[float, float]]:
        """Return pairs of samples/s: the reference's and the challenger's."""
        return [
            (reference["samples_per_sec"], metrics["samples_per_sec"])
            for reference, metrics in self._pairs(name)
        ]

    def mean_effect(self, name: str) -> float | None:
        """Return the effect by the mean rates, a fraction; None where a round has none."""
        key = "mean_samples_per_sec"
        pairs = [(a.get(key), b.get(key)) for a, b in self._pairs(name)]
        sound = [(a, b) for a, b in pairs if a is not None and b is not None and min(a, b) > 0]
        if not sound or len(sound) < len(pairs):
            return None
        return math.expm1(statistics.fmean(log_ratios(sound)))

    def losses(self, name: str) -> list[tuple[float, float]]:
        """Return pairs of losses that are both finite."""
        pairs = [(_loss(reference), _loss(metrics)) for reference, metrics in self._pairs(name)]
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def broken(self, name: str) -> int:
        """Return in how many rounds only the challenger's loss is no finite number."""
        return sum(
            _loss(reference) is not None and _loss(metrics) is None and not metrics["loss_finite"]
            for reference, metrics in self._pairs(name)
        )

    def _pairs(self, name: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return [
            (self._reference[one.round], one.metrics)
            for one in self._ok
            if one.name == name and one.round in self._reference
        ]


def _combined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the reference of a round: geometric means of its rates, the mean of its losses."""
    rates = {}
    for name in ("samples_per_sec", "mean_samples_per_sec"):
        values = [rate for metrics in runs if (rate := metrics.get(name)) is not None and rate > 0]
        if len(values) == len(runs):
            rates[name] = statistics.geometric_mean(values)
    losses = [loss for metrics in runs if (loss := _loss(metrics)) is not None]
    return {**rates, "loss": statistics.fmean(losses) if losses else None}


def _loss(metrics: Mapping[str, Any]) -> float | None:
    loss = metrics.get("loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _judged(
    rounds: _Rounds, names: Sequence[str], rules: Rules
) -> tuple[dict[str, EffectEstimate], dict[str, EffectEstimate]]:
    """Judge throughput and loss of these challengers with what is measured of all."""
    every = rounds.contest.challengers
    speed = judge({name: log_ratios(rounds.speeds(name)) for name in every}, rules)
    loss = {}
    for name in names:
        pairs = rounds.losses(name)
        loss[name] = judge_loss(loss_differences(pairs) if pairs else [], rules)
    return {name: speed[name] for name in names}, loss


def _look(standing: ComparisonState, rounds: _Rounds, still: Sequence[str], rules: Rules) -> None:
    """Judge after a round of a look, and note who is decided."""
    speed, loss = _judged(rounds, still, rules)
    standing.speed |= speed
    standing.loss |= loss
    standing.broken |= {name: rounds.broken(name) for name in still}
    standing.decided |= {name for name, one in speed.items() if one.side is not Side.OPEN}


def _look_between(
    standing: ComparisonState, rounds: _Rounds, still: Sequence[str], rules: Rules
) -> None:
    """Fill in what is known now of those that are not decided: their speed has no verdict."""
    names = [name for name in still if name not in standing.failed]
    speed, loss = _judged(rounds, names, rules)
    for name in names:
        one = speed[name]
        standing.speed[name] = EffectEstimate(Side.OPEN, one.rounds, one.effect, one.low, one.high)
        standing.loss[name] = loss[name]
        standing.broken[name] = rounds.broken(name)
