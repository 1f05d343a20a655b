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

from trainer.lab.statistics import Finding, Rules, Side, judge, log_ratios, loss_differences

TRIES = 2
"""Failed attempts at one sample after which its arm has failed."""
FAILURES = 3
"""Failed attempts in all rounds after which a challenger has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
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
class Next:
    """The sample to take next."""

    contest: str
    round: int
    name: str


@dataclass(frozen=True, slots=True)
class Contest:
    """A reference and its challengers, by name; `key` names the contest in samples.jsonl."""

    key: str
    reference: str
    challengers: tuple[str, ...]


@dataclass(slots=True)
class Standing:
    """How a contest stands; `next` is None once nothing is left to measure.

    `left` is the largest number of samples that may still come, should no one be decided.
    `speed` and `loss` have a finding for each challenger, the last one it was judged by.
    `broken` says in how many rounds a challenger's loss was no finite number while the reference's
    was. `mean_effect` has their effects by the mean rate over all steps, in which stalls count.
    `failed` holds the reasons of those that could not be measured, the reference among them.
    `flaky` says of each whose process failed how often it did, also where another attempt measured.
    """

    next: Next | None = None
    round: int = 0
    left: int = 0
    speed: dict[str, Finding] = field(default_factory=dict)
    loss: dict[str, Finding] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    mean_effect: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    flaky: dict[str, str] = field(default_factory=dict)


def of_contest(samples: Iterable[Sample], contest: str) -> list[Sample]:
    """Return the samples of one contest, in order."""
    return [sample for sample in samples if sample.contest == contest]


def stand(contest: Contest, samples: Sequence[Sample], rules: Rules, seed: int) -> Standing:
    """Play the contest again from its samples; return where it stands."""
    taken = of_contest(samples, contest.key)
    standing, rounds = Standing(), _Rounds(taken, contest.reference)
    standing.flaky = {
        name: flaky
        for name in (contest.reference, *contest.challengers)
        if (flaky := _flaky(taken, name)) is not None
    }
    still = list(contest.challengers)
    for number in range(1, rules.max_rounds + 1):
        standing.round = number
        names = order(contest, still, number, seed)
        for place, name in enumerate(names):
            attempts = [one for one in taken if (one.round, one.name) == (number, name)]
            if any(one.ok for one in attempts):
                continue
            too_often = name != contest.reference and _failures(taken, name) >= FAILURES
            if len(attempts) < TRIES and not too_often:
                standing.next = Next(contest.key, number, name)
                standing.left = len(names) - place + (rules.max_rounds - number) * len(names)
                break
            standing.failed[name] = (
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
    _look_between(standing, rounds.until(rules.max_rounds), still, rules)
    for name in standing.speed:
        mean = rounds.mean_effect(name)
        if mean is not None:
            standing.mean_effect[name] = mean
    return standing


def _failures(samples: Sequence[Sample], name: str) -> int:
    return sum(not one.ok for one in samples if one.name == name)


def _flaky(samples: Sequence[Sample], name: str) -> str | None:
    """Say how many processes of a setting failed, and how the last of them did."""
    failed = [one for one in samples if one.name == name and not one.ok]
    if not failed:
        return None
    count = sum(one.name == name for one in samples)
    return f"{len(failed)} of {count} processes failed: {failed[-1].reason}"


def order(contest: Contest, still: Sequence[str], number: int, seed: int) -> list[str]:
    """Return the reference and the remaining challengers in the random order of a round."""
    names = [contest.reference, *still]
    random.Random(f"{seed}/{contest.key}/{number}").shuffle(names)
    return names


class _Rounds:
    """The measured values by round: of throughput, and of the loss."""

    def __init__(self, samples: Sequence[Sample], reference: str) -> None:
        self._ok = [one for one in samples if one.ok]
        self._reference = {one.round: one.metrics for one in self._ok if one.name == reference}

    def until(self, last: int) -> _Rounds:
        """Return those of the first rounds."""
        part = _Rounds([], "")
        part._ok = [one for one in self._ok if one.round <= last]
        part._reference = self._reference
        return part

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


def _loss(metrics: Mapping[str, Any]) -> float | None:
    loss = metrics.get("loss")
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _judged(
    rounds: _Rounds, names: Sequence[str], rules: Rules, retained: int
) -> tuple[dict[str, Finding], dict[str, Finding]]:
    """Judge throughput and loss of these challengers with what is measured."""
    speed = {name: log_ratios(rounds.speeds(name)) for name in names}
    loss = {}
    for name in names:
        pairs = rounds.losses(name)
        loss[name] = loss_differences(pairs) if pairs else []
    return judge(speed, rules, retained=retained), judge(loss, rules, retained=retained)


def _look(standing: Standing, rounds: _Rounds, still: Sequence[str], rules: Rules) -> None:
    """Judge after a round of a look, and note who is decided."""
    retained = sum(standing.speed[name].side is Side.SAME for name in standing.decided)
    speed, loss = _judged(rounds, still, rules, retained)
    standing.speed |= speed
    standing.loss |= loss
    standing.broken |= {name: rounds.broken(name) for name in still}
    standing.decided |= {name for name, one in speed.items() if one.side is not Side.OPEN}


def _look_between(standing: Standing, rounds: _Rounds, still: Sequence[str], rules: Rules) -> None:
    """Fill in what is known now of those that are not decided: shown, but no verdict."""
    names = [name for name in still if name not in standing.failed]
    retained = sum(standing.speed[name].side is Side.SAME for name in standing.decided)
    speed, loss = _judged(rounds, names, rules, retained)
    for name in names:
        standing.speed[name] = _open(speed[name])
        if name not in standing.loss or standing.loss[name].side is Side.OPEN:
            standing.loss[name] = _open(loss[name])
        standing.broken[name] = rounds.broken(name)


def _open(one: Finding) -> Finding:
    """Return a finding between looks: its figures without a verdict."""
    return Finding(Side.OPEN, one.rounds, one.effect, one.low, one.high)
