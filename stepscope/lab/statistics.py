"""Estimate the effects of variants, from one pair of numbers per round. Pure.

docs/lab.md has the method, its definitions and its error rates. All differences are natural
logarithms of ratios (0.05 is about 5%); `EffectEstimate` has fractions.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.lab.folder import SweepError

NO_SCIPY = "Intervals need SciPy. Run pip install scipy, or pip install 'stepscope[lab]'."
MAX_VALUES = 1000  # of a side in `values_needed`
PATHS = 2**18  # Simulated paths of a level: the error over all looks is 5% ± 0.1 points.
MAX_EXACT_RANKS = 7
"""Largest number of values with an exact p of Spearman's test (7! = 5040 permutations)."""


class Side(StrEnum):
    """The position of an interval: above the minimum effect, below it, around 0, or open."""

    ABOVE = "above"
    BELOW = "below"
    SAME = "same"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The parameters of the method (`stepscope.lab.plan.SweepPlan` explains them)."""

    looks: tuple[int, ...]
    max_rounds: int
    alpha: float
    margin: float
    same: float

    @property
    def decision_rounds(self) -> tuple[int, ...]:
        """The rounds of the looks; the last round too, if it is after the first look.

        >>> Rules(looks=(5, 8, 12), max_rounds=10, alpha=.05, margin=.01, same=.03).decision_rounds
        (5, 8, 10)
        """
        within = [look for look in self.looks if look < self.max_rounds]
        first = min(self.looks, default=2)
        return (*within, self.max_rounds) if self.max_rounds >= first else ()

    def level(self, variants: int) -> float:
        """Return the level of each variant at each look.

        All variants are compared with one baseline in a single step (Dunnett 1955,
        doi:10.1080/01621459.1955.10501294), by Šidák's inequality (1967,
        doi:10.1080/01621459.1967.10482935): with round(√variants) baseline trials per round its
        critical value is at most 1% above Dunnett's. All looks have one level (Pocock 1977,
        doi:10.1093/biomet/64.2.191).
        """
        alpha = -math.expm1(math.log1p(-self.alpha) / max(1, variants))
        return _level_of_look(self.decision_rounds, alpha)


@cache
def load_scipy() -> Any:
    """Return scipy.special; the page shows recorded sweeps without it. Raises SweepError."""
    try:
        return importlib.import_module("scipy.special")
    except ModuleNotFoundError as error:
        raise SweepError(NO_SCIPY) from error


@cache
def _level_of_look(looks: tuple[int, ...], alpha: float) -> float:
    """Return the level of Student's t at each look that gives `alpha` over all looks.

    Simulated with a fixed seed, because the rounds between looks differ and the degrees of freedom
    are few. Bonferroni's level is the minimum, since a tiny alpha could fall below it by chance.
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
        smallest, before = np.minimum(smallest, 2 * load_scipy().stdtr(count - 1, -t)), count
    return float(max(alpha / len(looks), np.quantile(smallest, alpha)))


def moderated(
    variances: NDArray[np.float64], degrees: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the moderated variances of all variants and their degrees of freedom.

    Smyth 2004 (doi:10.2202/1544-6115.1027): the pooled variance has the weight of `prior` degrees
    of freedom, estimated from the spread of the log variances. Two limits keep the error rate if a
    few variants are much noisier: `prior` is less than the number of variants, and no moderated
    variance is below the measured one.
    """
    prior, typical = 0.0, float(np.median(variances)) if len(variances) else 0.0
    if len(variances) > 1 and typical > 0:
        # Equal values have no logarithm; limma's floor.
        logs = np.log(np.maximum(variances, 1e-5 * typical))
        logs -= load_scipy().digamma(degrees / 2) - np.log(degrees / 2)
        excess = float(logs.var(ddof=1) - load_scipy().polygamma(1, degrees / 2).mean())
        choices = np.geomspace(1e-3, len(variances) - 1, 500)
        prior = float(np.interp(-excess, -load_scipy().polygamma(1, choices / 2), choices))
    pooled = np.average(variances, weights=degrees) if len(variances) else 0.0
    mixed = (prior * pooled + degrees * variances) / (prior + degrees)
    return np.maximum(mixed, variances), degrees + prior


@dataclass(frozen=True, slots=True)
class EffectEstimate:
    """The effect of one variant at one look, as fractions of the reference (0.12 is 12% more)."""

    side: Side
    rounds: int
    effect: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def resolution(self) -> float | None:
        """The margin of error: around `effect` if it is above or below, else around 0."""
        if self.effect is None or self.low is None or self.high is None:
            return None
        center = self.effect if self.side in (Side.ABOVE, Side.BELOW) else 0.0
        return max(abs(self.low - center), abs(self.high - center))


def estimate_effects(
    differences: Mapping[str, Sequence[float]], rules: Rules
) -> dict[str, EffectEstimate]:
    """Estimate the effects of all variants at one look, decided ones with their rounds.

    Each interval has the level of its verdict: it is beyond the minimum effect exactly if the
    variant is called different. Fewer than two differences give no figures.
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
        none |= math.log1p(-rules.same) <= low <= 0 <= high <= math.log1p(rules.same)
        findings[name] = _finding(len(values), mean, low, high, margin, same=none)
    return findings


def estimate_loss(
    differences: Sequence[float], rules: Rules, *, are_logs: bool = True
) -> EffectEstimate:
    """Estimate the difference in loss of one variant: ABOVE, BELOW, or SAME if shown equal.

    This is an equivalence test: the interval of level alpha is within ±`same`, which is two
    one-sided tests at alpha / 2 (Schuirmann 1987, doi:10.1007/BF01068419). Variances are not
    pooled: the losses of some settings are reproduced bit for bit, those of others are not.
    """
    values, scale = np.asarray(differences), math.log1p if are_logs else float
    if len(values) < 2:
        return EffectEstimate(Side.OPEN, len(values))
    mean, low, high = _interval(values, values.var(ddof=1), len(values) - 1.0, rules.alpha)
    equal = scale(-rules.same) <= low and high <= scale(rules.same)
    found = _finding(len(values), mean, low, high, scale(rules.margin), same=equal)
    return found if are_logs else replace(found, effect=mean, low=low, high=high)


def _interval(
    values: NDArray[np.float64], variance: float, degrees: float, level: float
) -> tuple[float, float, float]:
    """Return the mean and Student's confidence interval with error probability `level`."""
    mean = float(values.mean())
    half = float(-load_scipy().stdtrit(degrees, level / 2) * math.sqrt(variance / len(values)))
    return mean, mean - half, mean + half


def confidence_interval(differences: Sequence[float], level: float) -> tuple[float, float, float]:
    """Return the mean of two or more log ratios and Student's interval, all as fractions.

    `level` is the interval's error probability.
    """
    values = np.asarray(differences)
    return _fractions(*_interval(values, values.var(ddof=1), len(values) - 1.0, level))


def unpaired_interval(
    reference: NDArray[np.float64], variant: NDArray[np.float64], level: float
) -> tuple[float, float, float]:
    """Return the change of the geometric mean and Welch's interval, as fractions.

    For independent processes that form no rounds, such as runs of different days. The error
    probability is `level`; the variances may differ (Welch 1947, doi:10.1093/biomet/34.1-2.28).
    Each side needs two values, all above 0, and one side unequal ones.
    """
    sides = [np.log(values) for values in (reference, variant)]
    parts = np.array([side.var(ddof=1) / len(side) for side in sides])
    mean, variance = float(sides[1].mean() - sides[0].mean()), float(parts.sum())
    degrees = variance**2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True)
    )
    half = float(-load_scipy().stdtrit(degrees, level / 2) * math.sqrt(variance))
    return _fractions(mean, mean - half, mean + half)


def values_needed(variance: float, half: float, level: float) -> int | None:
    """Return the values a side for an interval of ±`half`; None above MAX_VALUES.

    `variance` is the sum of the variances of both sides. Half the expected width of the interval
    of a difference of two means of n values each is t(2n - 2) * sqrt(variance / n) (Kelley et al.
    2003, doi:10.1177/0163278703255242).
    """
    counts = np.arange(2, MAX_VALUES + 1)
    widths = -load_scipy().stdtrit(2 * counts - 2, level / 2) * np.sqrt(variance / counts)
    return int(counts[np.argmax(widths <= half)]) if widths[-1] <= half else None


def _finding(
    rounds: int, mean: float, low: float, high: float, margin: float, *, same: bool
) -> EffectEstimate:
    side = Side.SAME if same else Side.OPEN
    if low > margin or high < -margin:
        side = Side.ABOVE if mean > 0 else Side.BELOW
    return EffectEstimate(side, rounds, *_fractions(mean, low, high))


def _fractions(mean: float, low: float, high: float) -> tuple[float, float, float]:
    """Return logarithms as fractions; after two rounds an end may be too large for a float."""
    return math.expm1(min(mean, 700.0)), math.expm1(min(low, 700.0)), math.expm1(min(high, 700.0))


def log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return log(variant / reference) of (reference, variant), both above 0."""
    return [math.log(variant) - math.log(reference) for reference, variant in pairs]


def loss_differences(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], bool]:
    """Return the differences of finite losses (reference, variant), and True for log ratios.

    These need losses above 0. Otherwise a ratio has no meaning, and the differences are fractions
    of the mean absolute loss of the reference unless it is 0.
    """
    if all(reference > 0 and variant > 0 for reference, variant in pairs):
        return log_ratios(pairs), True
    size = sum(abs(reference) for reference, _ in pairs) / len(pairs)
    return [(variant - reference) / (size or 1.0) for reference, variant in pairs], False


@dataclass(frozen=True, slots=True)
class DriftTest:
    """Spearman's rank correlation of values with their order, and its two-sided p value."""

    rho: float
    p: float


def drift(values: Sequence[float]) -> DriftTest | None:
    """Test for a trend of values in their order; None for fewer than five, or equal ones."""
    count = len(values)
    if count < 5 or len(set(values)) == 1:
        return None
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - times / 2)[place]  # equal values have the mean of their ranks
    order = np.arange(count, dtype=float)
    rho = float(np.corrcoef(order, ranks)[0, 1])
    if count <= MAX_EXACT_RANKS:
        # All permutations have the same mean and variance, so their products are compared.
        centered, others = ranks - ranks.mean(), np.array(list(itertools.permutations(order)))
        products = np.abs(others @ centered)
        return DriftTest(rho, float(np.mean(products >= abs(order @ centered) - 1e-9)))
    t = abs(rho) * math.sqrt((count - 2) / max(1e-12, 1 - rho * rho))
    return DriftTest(rho, float(2 * load_scipy().stdtr(count - 2, -t)))
