"""The lab's statistics against published values, and by simulated sweeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from trainer.lab.statistics import (
    Difference,
    Finding,
    Rules,
    Side,
    drift,
    judge,
    log_ratios,
    loss_differences,
)

RULES = Rules(looks=(5, 8, 12), max_rounds=12, alpha=0.05, margin=0.01, same=0.03)
ONE_LOOK = Rules(looks=(5,), max_rounds=5, alpha=0.05, margin=0.01, same=0.03)


@pytest.mark.parametrize(
    ("rounds", "level", "quantile"),
    # NIST/SEMATECH e-Handbook, table 1.3.6.7.2: critical values of Student's t.
    [(2, 0.05, 12.706), (5, 0.05, 2.776), (12, 0.05, 2.201), (12, 0.01, 3.106), (8, 0.002, 4.785)],
)
def test_the_interval_has_the_width_of_students_table(
    rounds: int, level: float, quantile: float
) -> None:
    low, high = Difference(rounds, 0.1, 0.02).interval(level)
    assert (high - 0.1) / 0.02 == pytest.approx(quantile, abs=6e-4)
    assert (0.1 - low) / 0.02 == pytest.approx(quantile, abs=6e-4)


def test_p_is_at_its_level_where_the_interval_touches_the_margin() -> None:
    one = Difference(5, 0.01 + 2.7764451 * 0.02, 0.02)
    assert one.interval(0.05)[0] == pytest.approx(0.01, abs=1e-7)
    assert one.p_beyond(0.01) == pytest.approx(0.05, abs=1e-6)
    assert Difference(5, -one.mean, 0.02).p_beyond(0.01) == pytest.approx(0.05, abs=1e-6)
    assert Difference(5, 0.009, 1e-9).p_beyond(0.01) == 1.0


def test_rules_share_alpha_among_the_looks_that_take_place() -> None:
    assert RULES.judged_after == (5, 8, 12)
    assert RULES.alpha_of_look == pytest.approx(0.05 / 3)
    assert ONE_LOOK.alpha_of_look == 0.05
    few = Rules(looks=(5, 8, 12), max_rounds=4, alpha=0.05, margin=0.01, same=0.03)
    assert few.judged_after == ()
    assert Rules(looks=(5, 8), max_rounds=20, alpha=1, margin=0, same=1).judged_after == (5, 8, 20)


def spread(mean: float, error: float, rounds: int = 5) -> list[float]:
    """Return `rounds` values with exactly this mean and standard error."""
    shape = np.arange(rounds) - (rounds - 1) / 2
    values = mean + shape / shape.std(ddof=1) * error * math.sqrt(rounds)
    return [float(value) for value in values]


def test_holm_lets_the_second_arm_pass_at_half_the_level() -> None:
    # Of p = 0.02 and 0.04, Bonferroni at 0.025 would take the first only; Holm takes both.
    margin = math.log1p(0.01)
    first = margin + 3.7469 * 0.01  # t of 4 degrees of freedom with a two-sided p of 0.02
    second = margin + 2.9985 * 0.01  # 0.04
    both = judge({"a": spread(first, 0.01), "b": spread(second, 0.01)}, ONE_LOOK)
    assert [both["a"].side, both["b"].side] == [Side.ABOVE, Side.ABOVE]
    # The first fails its level, 0.05 / 2: then the second must not pass either.
    weak = margin + 2.9985 * 0.01
    neither = judge({"a": spread(weak, 0.01), "b": spread(weak, 0.01)}, ONE_LOOK)
    assert [neither["a"].side, neither["b"].side] == [Side.OPEN, Side.OPEN]
    # An arm that left without a difference keeps its share.
    retained = judge({"a": spread(first, 0.01), "b": spread(second, 0.01)}, ONE_LOOK, retained=1)
    assert [retained["a"].side, retained["b"].side] == [Side.OPEN, Side.OPEN]


def test_findings_are_fractions_with_the_resolution_of_what_they_say() -> None:
    values = spread(math.log(1.12), 0.004)
    found = judge({"a": values}, ONE_LOOK)["a"]
    assert found.side is Side.ABOVE
    assert found.effect == pytest.approx(0.12)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.12 < found.high
    assert found.resolution == pytest.approx(max(0.12 - found.low, found.high - 0.12))
    slower = judge({"a": [-value for value in values]}, ONE_LOOK)["a"]
    assert slower.side is Side.BELOW
    assert slower.effect == pytest.approx(1 / 1.12 - 1)
    same = judge({"a": spread(0.002, 0.003)}, ONE_LOOK)["a"]
    assert same.side is Side.SAME
    assert same.resolution == pytest.approx(same.high)
    unsure = judge({"a": spread(0.002, 0.03)}, ONE_LOOK)["a"]
    assert unsure.side is Side.OPEN
    assert unsure.resolution == pytest.approx(unsure.high)


def test_a_small_difference_that_is_surely_there_is_not_called_none() -> None:
    found = judge({"a": spread(0.014, 0.002)}, ONE_LOOK)["a"]  # all of it above 0, at most 2 %
    assert found.side is Side.OPEN
    within = judge({"a": spread(0.004, 0.0005)}, ONE_LOOK)["a"]  # above 0, but within the margin
    assert within.side is Side.SAME


def test_one_round_says_nothing() -> None:
    assert judge({"a": [0.3], "b": []}, ONE_LOOK) == {
        "a": Finding(Side.OPEN, 1),
        "b": Finding(Side.OPEN, 0),
    }
    assert Finding(Side.OPEN, 1).resolution is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    found = judge({"a": [0.0] * 5}, ONE_LOOK)["a"]
    assert (found.side, found.low, found.high, found.resolution) == (Side.SAME, 0.0, 0.0, 0.0)


def test_losses_are_compared_by_ratio_and_by_difference_where_one_is_not_above_0() -> None:
    assert log_ratios([(2.0, 4.0)]) == [pytest.approx(math.log(2))]
    assert loss_differences([(2.0, 4.0)]) == [pytest.approx(math.log(2))]
    assert loss_differences([(0.0, 0.0), (2.0, 3.0)]) == [0.0, 1.0]
    assert loss_differences([(-2.0, -1.0), (-2.0, -2.0)]) == [0.5, 0.0]  # less negative is worse
    assert loss_differences([(0.0, 0.0)]) == [0.0]
    assert loss_differences([(0.0, 0.5)]) == [0.5]


def test_spearman_agrees_with_published_values() -> None:
    risen = drift([1, 2, 3, 4, 5])
    assert risen is not None
    # Two of the 120 permutations are as far from 0.
    assert (risen.rho, risen.p) == (pytest.approx(1), pytest.approx(2 / 120))
    values = [1, 3, 2, 6, 4, 5, 10, 8, 7, 9]
    ranks = drift(values)
    assert ranks is not None
    assert ranks.rho == pytest.approx(1 - 6 * 22 / 990)
    rho, p = spearmanr(range(10), values)
    assert (ranks.rho, ranks.p) == (pytest.approx(rho), pytest.approx(p))
    assert drift([3, 3, 3, 3, 3]) is None
    assert drift([1, 2, 3]) is None
    tied = drift([1, 1, 2, 2, 3])
    assert tied is not None
    assert tied.rho == pytest.approx(0.9487, abs=1e-4)


class Simulated:
    """Sweeps of arms with known effects: process noise, a drift, and looks as in the recipe."""

    def __init__(self, effects: list[float], *, noise: float, drift: float, seed: int) -> None:
        self.effects = effects
        self.noise = noise
        self.drift = drift
        self.rng = np.random.default_rng(seed)

    def findings(self) -> dict[str, Finding]:
        """Run one sweep; arms leave it once decided."""
        names = [str(i) for i in range(len(self.effects))]
        ratios = self._ratios()
        decided: dict[str, Finding] = {}
        for look in RULES.judged_after:
            still = [name for name in names if name not in decided]
            retained = sum(one.side is Side.SAME for one in decided.values())
            data = {name: ratios[int(name)][:look].tolist() for name in still}
            found = judge(data, RULES, retained=retained)
            decided |= {name: one for name, one in found.items() if one.side is not Side.OPEN}
        return {**found, **decided}

    def _ratios(self) -> list[np.ndarray]:
        rounds, count = RULES.max_rounds, len(self.effects) + 1
        logs = self.rng.normal(0, self.noise, (rounds, count))
        # Each sample of a round lies somewhere in it, and the machine slows all the while.
        places = self.rng.permuted(np.tile(np.arange(count), (rounds, 1)), axis=1)
        logs -= self.drift * (np.arange(rounds)[:, None] + places / count) / rounds
        return [math.log1p(e) + logs[:, i + 1] - logs[:, 0] for i, e in enumerate(self.effects)]


def test_simulated_sweeps_err_as_seldom_as_the_documentation_says() -> None:
    """The figures of docs/lab.md come from this simulation with 4000 sweeps."""
    sweeps = 300
    effects = [0.0, 0.0, 0.0, 0.05, -0.05]
    world = Simulated(effects, noise=0.012, drift=0.06, seed=1)
    false, found, covered, arms = 0, 0, 0, 0
    for _ in range(sweeps):
        results = world.findings()
        false += any(results[str(i)].side in (Side.ABOVE, Side.BELOW) for i in range(3))
        found += (results["3"].side is Side.ABOVE) + (results["4"].side is Side.BELOW)
        for name, effect in enumerate(effects):
            one = results[str(name)]
            assert one.low is not None
            assert one.high is not None
            covered += one.low <= effect <= one.high
            arms += 1
    assert false / sweeps <= 0.02
    assert found / (2 * sweeps) >= 0.97
    assert covered / arms >= 0.98
