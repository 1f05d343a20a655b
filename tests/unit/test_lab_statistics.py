"""The lab's statistics against published values, and by simulated sweeps."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import polygamma
from scipy.stats import norm

from benchmarks import lab_errors
from stepscope.lab.folder import SweepError
from stepscope.lab.statistics import (
    EffectEstimate,
    Rules,
    Side,
    estimate_effects,
    estimate_loss,
    load_scipy,
    moderated,
)

RULES = Rules(looks=(5, 8, 12), max_rounds=12)
ONE_LOOK = Rules(looks=(5,), max_rounds=5)


LIMIT = math.log1p(0.01) + 2.7764451 * 0.02


@pytest.mark.parametrize(
    ("mean", "error", "side"),
    [
        (LIMIT + 1e-6, 0.02, Side.ABOVE),
        (LIMIT - 1e-6, 0.02, Side.OPEN),
        (-LIMIT - 1e-6, 0.02, Side.BELOW),
        (0.014, 0.002, Side.OPEN),  # all of it above 0, at most 2%: not "no difference"
        (0.004, 0.0005, Side.SAME),  # above 0, but below the minimum effect
    ],
)
def test_the_side_of_an_interval(mean: float, error: float, side: Side) -> None:
    assert estimate_effects({"a": spread(mean, error)}, ONE_LOOK)["a"].side is side


def test_decisions_are_made_at_the_looks_that_take_place() -> None:
    assert RULES.decision_rounds == (5, 8, 12)
    few = replace(RULES, max_rounds=4)
    assert (few.decision_rounds, few.level(1)) == ((), 0.05)
    assert replace(RULES, looks=(5, 8), max_rounds=20).decision_rounds == (5, 8, 20)


def test_the_level_of_a_look_is_that_of_pocock_for_many_rounds() -> None:
    # Jennison and Turnbull 2000, table 2.1: C_P(K, 0.05) for equal groups of normal values.
    for looks, constant in ((2, 2.178), (3, 2.289), (5, 2.413)):
        rounds = tuple(1000 * look for look in range(1, looks + 1))
        level = replace(RULES, looks=rounds, max_rounds=rounds[-1]).level(1)
        assert level == pytest.approx(2 * norm.sf(constant), rel=0.02)


def test_variants_share_the_level_by_sidaks_inequality() -> None:
    rules = replace(ONE_LOOK, looks=(10**6,), max_rounds=10**6)
    assert rules.level(9) == pytest.approx(1 - 0.95 ** (1 / 9))


def test_variances_are_moderated_as_smyth_does() -> None:
    even = np.array([1.0, 1.1, 0.9, 1.0])
    degrees = np.full(4, 4.0)
    found, freedom = moderated(even, degrees)  # more alike than chance: the most that is allowed
    assert freedom == pytest.approx(4 + 3)
    assert found == pytest.approx(np.maximum((3 * 1.0 + 4 * even) / 7, even))
    wide = np.exp(np.array([-2.0, -1.0, 1.0, 2.0]))
    found, freedom = moderated(wide, degrees)
    prior = freedom[0] - 4
    # The definition of the estimate: the variance of the logs beyond that of the samples.
    excess = np.log(wide).var(ddof=1) - polygamma(1, 2)
    assert polygamma(1, prior / 2) == pytest.approx(excess, rel=1e-3)
    assert 0 < prior < 3
    assert (found >= wide).all()
    assert found[0] == pytest.approx((prior * wide.mean() + 4 * wide[0]) / (prior + 4))


def spread(mean: float, error: float, rounds: int = 5) -> list[float]:
    """Return `rounds` values with exactly this mean and standard error."""
    shape = np.arange(rounds) - (rounds - 1) / 2
    values = mean + shape / shape.std(ddof=1) * error * math.sqrt(rounds)
    return [float(value) for value in values]


def ends(finding: EffectEstimate) -> tuple[float, float]:
    """Return the ends of an interval as logarithms."""
    assert finding.low is not None
    assert finding.high is not None
    return math.log1p(finding.low), math.log1p(finding.high)


def test_estimates_are_fractions_with_a_margin_of_error() -> None:
    values = spread(math.log(1.12), 0.004)
    found = estimate_effects({"a": values}, ONE_LOOK)["a"]
    assert (found.side, found.effect) == (Side.ABOVE, pytest.approx(0.12))
    low, high = map(math.expm1, ends(found))
    assert found.resolution == pytest.approx(max(0.12 - low, high - 0.12))
    slower = estimate_effects({"a": [-value for value in values]}, ONE_LOOK)["a"]
    assert (slower.side, slower.effect) == (Side.BELOW, pytest.approx(1 / 1.12 - 1))
    equal = estimate_effects({"a": [0.0] * 5}, ONE_LOOK)["a"]
    assert (equal.side, equal.low, equal.high, equal.resolution) == (Side.SAME, 0.0, 0.0, 0.0)
    one_round = estimate_effects({"a": [0.3], "b": []}, ONE_LOOK)
    assert one_round == {"a": EffectEstimate(Side.OPEN, 1), "b": EffectEstimate(Side.OPEN, 0)}
    assert one_round["a"].resolution is None


def test_a_loss_is_equal_only_if_its_interval_lies_within_the_margin() -> None:
    for error, side in ((0.005, Side.SAME), (0.02, Side.OPEN)):
        assert estimate_loss(spread(0.001, error), RULES).side is side
    assert estimate_loss(spread(0.06, 0.01), RULES).side is Side.ABOVE
    assert estimate_loss(spread(0.024, 0.004), RULES).side is Side.ABOVE  # within 3 % or not
    assert estimate_loss([0.0] * 5, RULES).side is Side.SAME
    assert estimate_loss([0.1], RULES) == EffectEstimate(Side.OPEN, 1)


@pytest.mark.parametrize(
    "name", ["1 variant", "5 variants, half of them 2 × as noisy", "15 variants, leaving early"]
)
def test_simulated_sweeps_without_an_effect_are_seldom_wrong(name: str) -> None:
    """The figures of docs/lab.md are those of 10,000 sweeps."""
    world, rules = lab_errors.null_worlds()[name]
    assert lab_errors.family_wise_error(world, rules, 200)["error"] <= 0.07


def test_simulated_effects_are_found_with_their_size() -> None:
    world = replace(lab_errors.equal(5), effects=(0.0, 0.0, 0.0, 0.05, -0.05))
    found = lab_errors.power(world, 100)
    assert found["false"] <= 0.02
    assert found["found"] >= 0.98
    assert found["covered"] >= 0.97


def test_a_missing_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load_scipy.cache_clear()
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    rules = Rules(looks=(5, 8, 12), max_rounds=11, alpha=0.049)
    with pytest.raises(SweepError, match=r"stepscope\[lab\]"):
        rules.level(1)
