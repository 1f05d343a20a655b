"""Estimate the effects of variants, from one pair of numbers per round. Pure.

docs/lab.md has the method, its definitions and its error rates. All differences are natural
logarithms of ratios (0.05 is about 5%); `EffectEstimate` has fractions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.lab.folder import SweepError

NO_SCIPY = "Intervals need SciPy. Run pip install scipy, or pip install 'stepscope[lab]'."
ALPHA = 0.05
MARGIN = 0.01  # of an effect, as a fraction
PATHS = 2**18  # Simulated paths of a level: the error over all looks is 5% ± 0.1 points.


class Side(StrEnum):
    """The position of an interval: above the minimum effect, below it, around 0, or open."""

    ABOVE = "above"
    BELOW = "below"
    SAME = "same"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The parameters of the method.

    `alpha` is the probability of any false "faster" or "slower" among the variants, `margin` the
    minimum effect, `same` the widest interval around 0 that is called "no difference".
    """

    looks: tuple[int, ...]
    max_rounds: int
    alpha: float = ALPHA
    margin: float = MARGIN
    same: float = 0.03

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
    repeated = {name: np.asarray(values) for name, values in differences.items() if len(values) > 1}
    variances, degrees = moderated(
        np.array([values.var(ddof=1) for values in repeated.values()]),
        np.array([len(values) - 1.0 for values in repeated.values()]),
    )
    level, margin = rules.level(len(differences)), math.log1p(rules.margin)
    findings = {
        name: EffectEstimate(Side.OPEN, len(values)) for name, values in differences.items()
    }
    for (name, values), variance, free in zip(repeated.items(), variances, degrees, strict=True):
        mean, low, high = _interval(values, variance, free, level)
        is_small = -margin <= low and high <= margin
        is_none = math.log1p(-rules.same) <= low <= 0 <= high <= math.log1p(rules.same)
        is_same = is_small or is_none
        findings[name] = _finding(len(values), mean, low, high, rules, is_same=is_same)
    return findings


def estimate_loss(differences: Sequence[float], rules: Rules) -> EffectEstimate:
    """Estimate the difference in loss of one variant: ABOVE, BELOW, or SAME if shown equal.

    This is an equivalence test: the interval of level alpha is within ±`same`, which is two
    one-sided tests at alpha / 2 (Schuirmann 1987, doi:10.1007/BF01068419). Variances are not
    pooled: the losses of some settings are reproduced bit for bit, those of others are not.
    """
    values = np.asarray(differences)
    if len(values) < 2:
        return EffectEstimate(Side.OPEN, len(values))
    mean, low, high = _interval(values, values.var(ddof=1), len(values) - 1.0, rules.alpha)
    is_same = math.log1p(-rules.same) <= low and high <= math.log1p(rules.same)
    return _finding(len(values), mean, low, high, rules, is_same=is_same)


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


def _finding(
    rounds: int, mean: float, low: float, high: float, rules: Rules, *, is_same: bool
) -> EffectEstimate:
    margin = math.log1p(rules.margin)
    side = Side.SAME if is_same else Side.OPEN
    if low > margin:
        side = Side.ABOVE
    elif high < -margin:
        side = Side.BELOW
    return EffectEstimate(side, rounds, *_fractions(mean, low, high))


def _fractions(mean: float, low: float, high: float) -> tuple[float, float, float]:
    """Return logarithms as fractions; after two rounds an end may be too large for a float."""
    return math.expm1(min(mean, 700.0)), math.expm1(min(low, 700.0)), math.expm1(min(high, 700.0))


def log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return log(variant / reference) of (reference, variant), both above 0."""
    return [math.log(variant) - math.log(reference) for reference, variant in pairs]
