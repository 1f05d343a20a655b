"""Whether an arm differs from its reference, from one pair of numbers a round. Pure.

The recipe, its definitions and how often it errs are in docs/lab.md. All differences here are
natural logarithms of ratios (0.05 is about 5 %); `Finding` gives fractions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

EXACT_RANKS = 7
"""Up to this many values the p of Spearman's test counts all permutations (7! = 5040)."""


class Side(StrEnum):
    """What an interval says: all of it above the margin, below it, around 0, or nothing yet."""

    ABOVE = "above"
    BELOW = "below"
    SAME = "same"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The numbers of the recipe (`trainer.lab.plan.Plan` explains them)."""

    looks: tuple[int, ...]
    max_rounds: int
    alpha: float
    margin: float
    same: float

    @property
    def judged_after(self) -> tuple[int, ...]:
        """The rounds after which arms are judged; the last one too, if the first look is past.

        >>> Rules(looks=(5, 8, 12), max_rounds=10, alpha=.05, margin=.01, same=.03).judged_after
        (5, 8, 10)
        """
        within = [look for look in self.looks if look < self.max_rounds]
        first = min(self.looks, default=2)
        return (*within, self.max_rounds) if self.max_rounds >= first else ()

    @property
    def alpha_of_look(self) -> float:
        """The level of one look: Bonferroni's share, which holds however the looks depend."""
        return self.alpha / max(1, len(self.judged_after))


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean and standard error of `rounds` paired differences, two at least."""

    rounds: int
    mean: float
    error: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference | None:
        """Summarize finite differences; None for fewer than two."""
        count = len(differences)
        if count < 2:
            return None
        values = np.asarray(differences, dtype=float)
        return cls(count, float(values.mean()), float(values.std(ddof=1) / math.sqrt(count)))

    def interval(self, level: float) -> tuple[float, float]:
        """Return Student's interval that misses the true difference with chance `level`."""
        half = self.error * float(-stdtrit(self.rounds - 1, level / 2))
        return self.mean - half, self.mean + half

    def p_beyond(self, margin: float) -> float:
        """Return the p value of "the true difference is at most `margin`, up or down".

        It is at most `level` exactly where the interval of that level lies beyond the margin.
        """
        beyond = abs(self.mean) - margin
        if beyond <= 0:
            return 1.0
        if self.error == 0:
            return 0.0
        return float(2 * stdtr(self.rounds - 1, -beyond / self.error))


@dataclass(frozen=True, slots=True)
class Finding:
    """One arm as judged at one look, in fractions of the reference (0.12 is 12 % more)."""

    side: Side
    rounds: int
    effect: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def resolution(self) -> float | None:
        """How far the true effect may lie from what is said: from `effect`, or from 0 if open."""
        if self.effect is None or self.low is None or self.high is None:
            return None
        said = self.effect if self.side in (Side.ABOVE, Side.BELOW) else 0.0
        return max(abs(self.low - said), abs(self.high - said))


def judge(
    differences: Mapping[str, Sequence[float]], rules: Rules, *, retained: int = 0
) -> dict[str, Finding]:
    """Judge arms at one look by Holm's procedure.

    `retained` counts the arms that left before without a difference: they keep their share of
    the error. The smallest p is tested at level / n, the next at level / (n - 1), until one is
    not below its level. Each interval has the level at which its arm was tested.
    """
    margin = math.log1p(rules.margin)
    found = {name: Difference.of(values) for name, values in differences.items()}
    tested = sorted(
        ((one.p_beyond(margin), name) for name, one in found.items() if one is not None),
    )
    left = len(found) + retained
    findings = {
        name: Finding(Side.OPEN, len(differences[name]))
        for name, one in found.items()
        if one is None
    }
    for p, name in tested:
        one = found[name]
        assert one is not None
        level = rules.alpha_of_look / max(1, left)
        # After the first that is not below its level none is: p rises, and the level stays.
        different = p <= level
        findings[name] = _finding(one, level, margin, rules.same, different=different)
        left -= different
    return {name: findings[name] for name in differences}


def _finding(
    one: Difference, level: float, margin: float, same: float, *, different: bool
) -> Finding:
    low, high = one.interval(level)
    effect, bottom, top = (math.expm1(value) for value in (one.mean, low, high))
    if different:
        side = Side.ABOVE if one.mean > 0 else Side.BELOW
    elif _about_none(low, high, margin) or (low <= 0 <= high and max(-bottom, top) <= same):
        side = Side.SAME
    else:
        side = Side.OPEN
    return Finding(side, one.rounds, effect, bottom, top)


def _about_none(low: float, high: float, margin: float) -> bool:
    return -margin <= low and high <= margin


def log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return log(arm / reference) of (reference, arm), both above 0."""
    return [math.log(arm / reference) for reference, arm in pairs]


def loss_differences(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the differences of finite losses (reference, arm), paired by seed.

    They are log ratios where all losses are above 0. Otherwise a ratio means nothing, and they are
    differences over the mean size of the reference's losses; where that is 0 they are as they are.
    """
    if all(reference > 0 and arm > 0 for reference, arm in pairs):
        return log_ratios(pairs)
    size = sum(abs(reference) for reference, _ in pairs) / len(pairs)
    return [(arm - reference) / (size or 1.0) for reference, arm in pairs]


@dataclass(frozen=True, slots=True)
class Drift:
    """Spearman's rank correlation of values with their order, and its two-sided p value."""

    rho: float
    p: float


def drift(values: Sequence[float]) -> Drift | None:
    """Test whether values rise or fall in their order; None for fewer than five, or all equal.

    p counts permutations up to EXACT_RANKS values, above that it is Student's approximation.
    """
    count = len(values)
    if count < 5 or len(set(values)) == 1:
        return None
    ranks = _ranks(values)
    order = np.arange(count, dtype=float)
    rho = _correlation(order, ranks)
    if count <= EXACT_RANKS:
        centered, others = ranks - ranks.mean(), np.array(list(itertools.permutations(order)))
        # The permutations have one mean and spread: the product alone decides.
        products = np.abs((others - order.mean()) @ centered)
        own = abs(float((order - order.mean()) @ centered))
        return Drift(rho, float(np.mean(products >= own - 1e-9)))
    if abs(rho) >= 1 - 1e-12:
        return Drift(rho, 2 / math.factorial(count))
    t = abs(rho) * math.sqrt((count - 2) / (1 - rho * rho))
    return Drift(rho, float(2 * stdtr(count - 2, -t)))


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Return ranks from 0; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=float)
    below = (array[:, None] > array[None, :]).sum(axis=1)
    equal = (array[:, None] == array[None, :]).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2, dtype=np.float64)


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.corrcoef(a, b)[0, 1])
