"""The rate of a window of steps: unbiased in bursts and across epochs, robust to one hiccup."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope.lab.measurement import rate

Steps = NDArray[np.float64]
ONE_EPOCH = np.ones(10_000)


def smooth(rng: np.random.Generator, count: int) -> Steps:
    return np.exp(rng.normal(0, 0.05, count))


def bursts(period: int) -> Callable[[np.random.Generator, int], Steps]:
    """Steps of mean 1: all but one of each period wait for nothing, as with `period` workers."""

    def make(rng: np.random.Generator, count: int) -> Steps:
        slow = (np.arange(count) + rng.integers(period)) % period == 0
        seconds = np.where(slow, period - 0.02 * (period - 1), 0.02)
        return np.asarray(seconds * np.exp(rng.normal(0, 0.05, count)), dtype=np.float64)

    return make


def estimates(
    make: Callable[[np.random.Generator, int], Steps], count: int, sweeps: int = 200
) -> Steps:
    rng = np.random.default_rng(count)
    return np.array(
        [rate(make(rng, count), np.ones(count), ONE_EPOCH[:count]) for _ in range(sweeps)]
    )


def test_the_rate_is_unbiased_in_bursts(subtests: pytest.Subtests) -> None:
    for count, make in itertools.product(
        [30, 60, 200, 1000], [smooth, *(bursts(period) for period in (2, 3, 4, 7, 8))]
    ):
        with subtests.test(f"{make.__qualname__} {count}"):
            found = estimates(make, count)
            error = found.std() / np.sqrt(len(found))
            assert found.mean() == pytest.approx(1, abs=0.006 + 3 * error)


def test_a_pause_every_few_steps_counts_without_a_loader() -> None:
    """Such a script has no epochs; a median over steps would not see its slow ones."""
    seconds = np.where(np.arange(200) % 4 == 3, 21.0, 1.0)
    none = np.full(200, np.nan)
    assert rate(seconds, np.ones(200), none) == pytest.approx(4 / 24)
    assert rate(seconds, np.ones(200), none) == rate(seconds, np.ones(200), ONE_EPOCH[:200])


def test_one_hiccup_hardly_moves_the_rate() -> None:
    seconds = np.ones(200)
    seconds[77] = 40.0
    assert rate(seconds, np.ones(200), ONE_EPOCH[:200]) == pytest.approx(1)
    assert 200 / seconds.sum() < 0.85


def test_each_epoch_is_a_block_where_there_are_five_whole_ones() -> None:
    # Six steps an epoch: the first waits for the workers to start, the last batch is smaller.
    epochs = np.repeat(np.arange(9), 6).astype(float)
    seconds, samples = np.ones(54), np.full(54, 128.0)
    seconds[::6], samples[5::6] = 7.0, 64.0
    expected = (5 * 128 + 64) / 12
    assert rate(seconds, samples, epochs) == pytest.approx(expected)
    # Cut anywhere: only whole epochs count.
    assert rate(seconds[3:50], samples[3:50], epochs[3:50]) == pytest.approx(expected)
    # Blocks of ten steps would have one or two of the smaller batches.
    assert rate(np.ones(54), samples, epochs) == pytest.approx((5 * 128 + 64) / 6)
    few = rate(np.ones(54), samples, np.ones(54))
    assert few != pytest.approx((5 * 128 + 64) / 6, rel=0.01)


def test_a_short_window_gives_its_mean() -> None:
    seconds = np.array([1.0, 1.0, 4.0])
    assert rate(seconds, np.full(3, 2.0), np.ones(3)) == pytest.approx(1)
