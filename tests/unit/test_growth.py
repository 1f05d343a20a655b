"""Which series of memory readings are growth: made-up leaks, noise, teeth, steps and caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.memory.growth import (
    MIN_SAMPLES,
    GrowthTrend,
    find_trend,
    is_material,
)
from stepscope.store.blocks import Floats

MIB = 2.0**20
N = 128
LONG_S = 3600.0

Shape = Callable[[Floats, np.random.Generator], Floats]


def series(shape: Shape, n: int = N, seed: int = 0) -> tuple[Floats, Floats]:
    """Readings at steps 0, 10, 20 …: `shape` makes MiB of them, of 0 to 1."""
    steps = 10.0 * np.arange(n)
    values = shape(np.linspace(0, 1, n), np.random.default_rng(seed))
    return steps, MIB * (500 + values)


def noise(rng: np.random.Generator, n: int, deviation: float = 1.0) -> Floats:
    return rng.normal(0, deviation, n)


GROWS: dict[str, Shape] = {
    "a leak in noise": lambda x, rng: 100 * x + noise(rng, len(x)),
    "a leak under the teeth of a collector": lambda x, rng: 200 * x + 10 * (32 * x % 1),
    "a leak that gets faster": lambda x, rng: 60 * x + 60 * x**2,
    "a leak with one large tensor for a moment": lambda x, rng: (
        100 * x + 400 * (abs(x - 0.4) < 0.01)
    ),
}
DOES_NOT: dict[str, Shape] = {
    "noise": lambda x, rng: noise(rng, len(x), 10),
    "a step": lambda x, rng: 200.0 * (x > 0.5) + noise(rng, len(x)),
    "a step on a gentle rise": lambda x, rng: 20 * x + 200.0 * (x > 0.5),
    "teeth": lambda x, rng: 200 * (6 * x % 1),
    "epochs whose workers are started again": lambda x, rng: 100 * np.sqrt(4 * x % 1),
    "a cache that fills": lambda x, rng: 200 * (1 - np.exp(-5 * x)),
    "a vocabulary": lambda x, rng: 60 * np.log(1 + 100 * x),
    "a leak that has ended": lambda x, rng: 100 * np.minimum(x, 0.7),
    "a leak that begins": lambda x, rng: 400 * np.maximum(0, x - 0.8),
}


@pytest.mark.parametrize("name", GROWS)
def test_it_grows(name: str) -> None:
    steps, values = series(GROWS[name])
    trend = find_trend(steps, values)
    assert trend is not None
    assert is_material(trend, "allocated", LONG_S)
    true = (values[-1] - values[0]) / steps[-1]
    assert trend.bytes_per_step == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("name", DOES_NOT)
def test_it_does_not_grow(name: str) -> None:
    assert all(find_trend(*series(DOES_NOT[name], seed=seed)) is None for seed in range(5))


def test_an_exact_leak_has_its_rate() -> None:
    trend = find_trend(*series(lambda x, rng: 127 * x))  # 1 MiB a reading, of 10 steps
    assert trend is not None
    assert trend.bytes_per_step == pytest.approx(MIB / 10)
    assert (trend.first_step, trend.last_step) == (75, 1195), "middles of the outer eighths"
    assert trend.grown == pytest.approx(112 * MIB)


def test_few_readings_or_the_same_step_say_nothing() -> None:
    steps, values = series(lambda x, rng: 100 * x)
    assert find_trend(steps[: MIN_SAMPLES - 1], values[: MIN_SAMPLES - 1]) is None
    assert find_trend(steps[:MIN_SAMPLES], values[:MIN_SAMPLES]) is not None
    assert find_trend(0 * steps, values) is None


def some_steps(rng: np.random.Generator, n: int) -> Floats:
    """Memory that is taken for good six times or so, as by ever larger batches."""
    return np.cumsum((rng.random(n) < 6 / n) * rng.exponential(30, n)) + noise(rng, n, 3)


def red(rng: np.random.Generator, n: int) -> Floats:
    """Noise of which each value is 0.9 of the one before and something new."""
    out, value = np.empty(n), 0.0
    for i, new in enumerate(rng.normal(0, 1, n)):
        out[i] = value = 0.9 * value + new
    return out


FALSE_ALARMS: dict[str, tuple[Any, int]] = {
    "white noise": (noise, 0),
    "red noise": (red, 1),
    "a random walk": (lambda rng, n: np.cumsum(rng.normal(0, 1, n)), 4),
    "steps": (some_steps, 20),
}
"""Of 2000 series of each kind, how many may be taken for growth: a walk does grow, by chance."""


@pytest.mark.parametrize("kind", FALSE_ALARMS)
@pytest.mark.parametrize("n", [MIN_SAMPLES, N])
def test_false_alarms_are_rare(kind: str, n: int) -> None:
    make, most = FALSE_ALARMS[kind]
    steps = np.arange(n) * 10.0
    rng = np.random.default_rng(1)
    alarms = sum(find_trend(steps, MIB * (500 + make(rng, n))) is not None for _ in range(2000))
    assert alarms <= most


@settings(max_examples=60, deadline=None)
@given(
    st.integers(MIN_SAMPLES, N),
    st.floats(1e3, 1e9),
    st.floats(0, 1e12),
    st.integers(0, 2**32 - 1),
)
def test_any_even_leak_is_seen(n: int, rate: float, level: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.integers(3, 7, n)).astype(float)
    trend = find_trend(steps, level + rate * steps)
    assert trend is not None
    assert trend.bytes_per_step == pytest.approx(rate, rel=1e-2)


def trend_of(rate: float, level: float = 1000 * MIB) -> GrowthTrend:
    return GrowthTrend(100, 500, level - 400 * rate, level)


@pytest.mark.parametrize(
    ("rate", "level", "kind", "seconds", "options", "material"),
    [
        (0.05, 1000, "allocated", 600, {}, True),
        (0.05, 9000, "allocated", 600, {}, False),
        (0.005, 20, "allocated", 600, {}, False),
        (0.05, 1000, "allocated", 20, {}, False),
        (0.30, 1000, "allocated", 20, {}, True),
        (0.03, 1000, "process", 600, {}, False),
        (0.06, 1000, "process", 600, {}, True),
        (0.06, 1000, "process", 60, {}, False),
        (0.70, 1000, "process", 60, {}, True),
        (0.40, 1000, "process", 600, {"filling": True}, False),
        (0.60, 1000, "process", 600, {"filling": True}, True),
    ],
)
def test_material_growth(
    rate: float, level: float, kind: str, seconds: float, options: dict[str, bool], material: bool
) -> None:
    """Over 400 steps: rate and level in MiB."""
    trend = trend_of(rate * MIB, level=level * MIB)
    assert is_material(trend, kind, seconds, **options) is material
