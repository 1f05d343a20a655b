"""The rate of a window of steps: unbiased in bursts and across epochs, robust to one hiccup."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope.lab.measurement import rate, steps_together

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


def ranks_of(ends: list[list[float]], seconds: list[list[float]]) -> list[Any]:
    return [
        SimpleNamespace(
            times=np.array(end),
            seconds=np.array(took),
            samples=np.full(len(end), 32.0),
            epochs=np.ones(len(end)),
        )
        for end, took in zip(ends, seconds, strict=True)
    ]


def test_a_step_is_as_long_as_its_last_rank_and_has_the_samples_of_all() -> None:
    # The second rank ends each step 0.1 s later: that is not time of the job.
    late = ranks_of([[1.0, 2.0, 3.0], [1.1, 2.1, 3.1]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    seconds, samples = steps_together(late)
    assert seconds.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert samples.tolist() == [64.0, 64.0, 64.0]
    # In each step one rank or the other returns late, and begins its next step late.
    jittered = ranks_of([[1.2, 2.0, 3.2], [1.0, 2.2, 3.0]], [[1.2, 0.8, 1.2], [1.0, 1.2, 0.8]])
    assert steps_together(jittered)[0][1:].sum() == pytest.approx(3.2 - 1.2)
    # Validation between two steps does not count.
    paused = ranks_of([[1.0, 12.0], [1.0, 12.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert steps_together(paused)[0].tolist() == [1.0, 1.0]


def test_a_pause_every_few_steps_counts_without_a_loader() -> None:
    """Such a script has no epochs; a median over steps would not see its slow ones."""
    seconds = np.where(np.arange(200) % 4 == 3, 21.0, 1.0)
    none = np.full(200, np.nan)
    assert rate(seconds, np.ones(200), none) == pytest.approx(4 / 24)
    assert rate(seconds, np.ones(200), none) == rate(seconds, np.ones(200), ONE_EPOCH[:200])
