"""Whether an arm differs from its reference, from one pair of numbers a round. Pure.

The recipe, its definitions and how often it errs are in docs/lab.md. All differences here are
natural logarithms of ratios (0.05 is about 5 %); `EffectEstimate` gives fractions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, polygamma, stdtr, stdtrit

PATHS = 2**18  # Simulated paths behind a level: the error over all looks is 5 % within ±0.1 points.
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
    """The numbers of the recipe (`trainer.lab.plan.SweepPlan` explains them)."""

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

    def level(self, arms: int) -> float:
        """Return the level of each arm at each look, one for all of them.

        All arms are compared with one baseline in a single step (Dunnett 1955,
        doi:10.1080/01621459.1955.10501294), by Šidák's inequality (1967,
        doi:10.1080/01621459.1967.10482935): for round(√arms) baseline runs a round its critical
        value is at most 1 % above Dunnett's. All looks have one level (Pocock 1977,
        doi:10.1093/biomet/64.2.191).
        """
        alpha = -math.expm1(math.log1p(-self.alpha) / max(1, arms))
        return _level_of_look(self.judged_after, alpha)


@cache
def _level_of_look(looks: tuple[int, ...], alpha: float) -> float:
    """Return the level of Student's t at each look that gives `alpha` over all looks.

    Simulated from a fixed seed, because the rounds between looks differ and the degrees of freedom
    are few. Limited by Bonferroni's level, so that a tiny alpha cannot exceed it by chance.
    """
    if len(looks) < 2:
        return alpha
    random = np.random.default_rng(0)
    total, squares = np.zeros((2, PATHS))
    smallest, before = np.ones(PATHS), 0
    for count in looks:
        added = count - before
        mean = random.standard_normal(PATHS) / math.sqrt(added)
        squares += 2 * random.standard_gamma((added - 1) / 2, PATHS) + added * mean**2
        total += added * mean
        variance = (squares - total**2 / count) / (count - 1)
        t = np.abs(total) / np.sqrt(count * variance)
        smallest, before = np.minimum(smallest, 2 * stdtr(count - 1, -t)), count
    return float(max(alpha / len(looks), np.quantile(smallest, alpha)))


def moderated(
    variances: NDArray[np.float64], degrees: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the moderated variances of all arms and their degrees of freedom.

    Smyth 2004 (doi:10.2202/1544-6115.1027): the pooled variance has the weight of `prior` degrees
    of freedom, estimated from the spread of the log variances. Two limits keep the error rate where
    a few arms are much noisier: `prior` is less than the number of arms, and no variance becomes
    smaller than the arm's own.
    """
    prior, typical = 0.0, float(np.median(variances)) if len(variances) else 0.0
    if len(variances) > 1 and typical > 0:
        # Equal values have no logarithm; limma's floor.
        logs = np.log(np.maximum(variances, 1e-5 * typical))
        logs -= digamma(degrees / 2) - np.log(degrees / 2)
        excess = float(logs.var(ddof=1) - polygamma(1, degrees / 2).mean())
        choices = np.geomspace(1e-3, len(variances) - 1, 500)
        prior = float(np.interp(-excess, -polygamma(1, choices / 2), choices))
    pooled = np.average(variances, weights=degrees) if len(variances) else 0.0
    mixed = (prior * pooled + degrees * variances) / (prior + degrees)
    return np.maximum(mixed, variances), degrees + prior


@dataclass(frozen=True, slots=True)
class EffectEstimate:
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


def judge(differences: Mapping[str, Sequence[float]], rules: Rules) -> dict[str, EffectEstimate]:
    """Judge all arms of a sweep at one look; those that left belong to it with their rounds.

    Each interval has the level of its verdict: it lies beyond the margin exactly where the arm is
    called different. Fewer than two differences give no figures.
    """
    several = {name: np.asarray(values) for name, values in differences.items() if len(values) > 1}
    variances, degrees = moderated(
        np.array([values.var(ddof=1) for values in several.values()]),
        np.array([len(values) - 1.0 for values in several.values()]),
    )
    level, margin = rules.level(len(differences)), math.log1p(rules.margin)
    findings = {
        name: EffectEstimate(Side.OPEN, len(values)) for name, values in differences.items()
    }
    for (name, values), variance, free in zip(several.items(), variances, degrees, strict=True):
        mean, low, high = _interval(values, variance, free, level)
        none = -margin <= low and high <= margin
        none |= low <= 0 <= high and _within(low, high, rules.same)
        findings[name] = _finding(len(values), mean, low, high, margin, same=none)
    return findings


def judge_loss(differences: Sequence[float], rules: Rules) -> EffectEstimate:
    """Judge the loss of one arm by itself: ABOVE, BELOW, or SAME where it is shown equal.

    Equal is an equivalence test: the interval of level alpha lies within ±`same`, which is two
    one-sided tests at alpha / 2 (Schuirmann 1987, doi:10.1007/BF01068419). Its variance is the
    arm's own: losses of some settings are reproduced to the bit, those of others are not.
    """
    values, margin = np.asarray(differences), math.log1p(rules.margin)
    if len(values) < 2:
        return EffectEstimate(Side.OPEN, len(values))
    mean, low, high = _interval(values, values.var(ddof=1), len(values) - 1.0, rules.alpha)
    equal = _within(low, high, rules.same)
    return _finding(len(values), mean, low, high, margin, same=equal)


def _within(low: float, high: float, same: float) -> bool:
    return math.log1p(-same) <= low and high <= math.log1p(same)


def _interval(
    values: NDArray[np.float64], variance: float, degrees: float, level: float
) -> tuple[float, float, float]:
    """Return the mean and Student's interval that misses the true one with chance `level`."""
    mean = float(values.mean())
    half = float(-stdtrit(degrees, level / 2) * math.sqrt(variance / len(values)))
    return mean, mean - half, mean + half


def _finding(
    rounds: int, mean: float, low: float, high: float, margin: float, *, same: bool
) -> EffectEstimate:
    """Return the finding of an interval of logarithms."""
    side = Side.SAME if same else Side.OPEN
    if low > margin or high < -margin:
        side = Side.ABOVE if mean > 0 else Side.BELOW
    # Two rounds may give an interval whose end is no float as a ratio.
    return EffectEstimate(
        side, rounds, *(math.expm1(min(value, 700.0)) for value in (mean, low, high))
    )


def log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return log(arm / reference) of (reference, arm), both above 0."""
    return [math.log(arm) - math.log(reference) for reference, arm in pairs]


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
class DriftTest:
    """Spearman's rank correlation of values with their order, and its two-sided p value."""

    rho: float
    p: float


def drift(values: Sequence[float]) -> DriftTest | None:
    """Test whether values rise or fall in their order; None for fewer than five, or all equal.

    p counts permutations up to EXACT_RANKS values, above that it is Student's approximation.
    """
    count = len(values)
    if count < 5 or len(set(values)) == 1:
        return None
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - times / 2)[place]  # equal values share the mean of theirs
    order = np.arange(count, dtype=float)
    rho = float(np.corrcoef(order, ranks)[0, 1])
    if count <= EXACT_RANKS:
        # The permutations have one mean and spread: the product alone decides.
        centered, others = ranks - ranks.mean(), np.array(list(itertools.permutations(order)))
        products = np.abs(others @ centered)
        return DriftTest(rho, float(np.mean(products >= abs(order @ centered) - 1e-9)))
    t = abs(rho) * math.sqrt((count - 2) / max(1e-12, 1 - rho * rho))
    return DriftTest(rho, float(2 * stdtr(count - 2, -t)))
