"""Blocks survive their bytes, and buckets keep extremes and ignore what is missing."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.store.blocks import SeriesBlock, decode, encode, join, merge
from tests.support.run_folders import block_of_rows


def rows(*values: float | None, key: str = "train/loss") -> SeriesBlock:
    return block_of_rows([(100.0 + i, i, {key: value}) for i, value in enumerate(values)])


@pytest.mark.parametrize("level", [0, 2])
def test_bytes_give_the_block_back_bit_for_bit(level: int) -> None:
    block = rows(1.5, None, 150_754_820_096.0, -0.0, float("inf"), float("nan"))
    assert block.nonfinite.tolist() == [[0, 0, 0, 0, 1, 1]]
    back = decode(encode(block, level), block.keys, len(block), level)
    for name in ("ts", "step", "low", "high", "mean", "count", "nonfinite"):
        np.testing.assert_array_equal(getattr(back, name), getattr(block, name))


def test_a_nan_that_was_recorded_is_not_missing_however_it_travels() -> None:
    block = rows(None, float("nan"))
    traveled = join([block, rows(1.0, key="val/loss")]).with_keys(("val/loss", "train/loss"))
    raw = SeriesBlock.raw(traveled.keys, traveled.ts, traveled.step, traveled.mean.copy()[:, ::-1])
    for found in (traveled.slice(0, 2), decode(encode(traveled, 0), traveled.keys, 3, 0)):
        assert found.nonfinite[1].tolist()[:2] == [0, 1]
    assert raw.nonfinite[1].tolist() == [0, 1, 0]
    assert np.isnan(block.mean).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bucket_is_of_its_finite_values_and_counts_the_others(value: float) -> None:
    merged = merge(rows(value, 1.0, 3.0, None, 8.0, value, value), np.array([0, 4, 5]))
    for figures, expected in (
        (merged.mean, [2.0, 8.0, np.nan]),
        (merged.low, [1.0, 8.0, np.nan]),
        (merged.high, [3.0, 8.0, np.nan]),
        (merged.count, [2, 1, 0]),
        (merged.nonfinite, [1, 0, 2]),
    ):
        np.testing.assert_array_equal(figures[0], expected)
    assert merged.ts.tolist() == [103.0, 104.0, 106.0]
    again = merge(merged, np.array([0]))
    assert (again.mean[0, 0], again.high[0, 0], again.nonfinite[0, 0]) == (4.0, 8.0, 3)
