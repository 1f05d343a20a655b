"""Slots become rows, rows become buckets, and blocks survive their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stepscope.store import SeriesBlock
from stepscope.store.blocks import (
    STEPS,
    decode,
    encode,
    find_broken_losses,
    join,
    merge,
    series_blocks,
)
from stepscope.store.ring import RingBuffer
from tests.support.run_folders import block_of_rows

NAN = math.nan


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingBuffer]:
    ring = RingBuffer(tmp_path / "rank0.ring")
    yield ring
    ring.delete()


def put(ring: RingBuffer, ts: float, step: int, **values: float) -> None:
    layout = ring.layout((*STEPS, *values))
    assert layout is not None
    ring.put(layout, ts, step, *values.values())


def block(ring: RingBuffer) -> SeriesBlock:
    pending = ring.pending()
    ring.release(pending)
    return series_blocks(pending)[STEPS]


def column(block: SeriesBlock, key: str) -> list[float]:
    found: list[float] = block.mean[block.keys.index(key)].tolist()
    return found


def same(got: list[float], wanted: list[float]) -> bool:
    return np.array_equal(got, wanted, equal_nan=True)


def test_a_metric_missing_from_a_row_is_nan(ring: RingBuffer) -> None:
    put(ring, 1.0, 1, a=1.0)
    put(ring, 2.0, 2, a=2.0, b=5.0)
    put(ring, 3.0, 3, b=0.0)
    found = block(ring)
    assert same(column(found, "a"), [1.0, 2.0, NAN])
    assert same(column(found, "b"), [NAN, 5.0, 0.0])


def test_slots_of_one_moment_and_step_are_one_row(ring: RingBuffer) -> None:
    put(ring, 1.0, 1, a=1.0)
    put(ring, 1.0, 1, b=2.0)
    put(ring, 1.0, 2, a=3.0)
    found = block(ring)
    assert len(found) == 2
    assert same(column(found, "a"), [1.0, 3.0])
    assert same(column(found, "b"), [2.0, NAN])


def test_a_count_becomes_a_rate_by_its_step_time(ring: RingBuffer) -> None:
    put(ring, 1.0, 1, **{"perf/samples": 8.0})
    put(ring, 2.0, 2, **{"perf/step_time": 0.5, "perf/samples": 8.0, "perf/tokens": 3.0})
    put(ring, 3.0, 3, **{"perf/step_time": 0.0, "perf/samples": 8.0})
    put(ring, 4.0, 4, **{"perf/step_time": 0.5})
    found = block(ring)
    assert same(column(found, "perf/samples_per_sec"), [NAN, 16.0, math.inf, NAN])
    assert same(column(found, "perf/tokens_per_sec"), [NAN, 6.0, NAN, NAN])
    assert found.nonfinite.sum() == 1, "a missing rate is not one that is no number"


def test_a_rate_of_the_script_is_kept(ring: RingBuffer) -> None:
    own = {"perf/step_time": 0.25, "perf/samples": 8.0, "perf/samples_per_sec": 30.0}
    put(ring, 4.0, 3, **own)
    assert column(block(ring), "perf/samples_per_sec") == [30.0]


@pytest.mark.parametrize(
    ("key", "value"), [("train/loss", -math.inf), ("train/loss.optimizer1", math.nan)]
)
def test_a_broken_loss_is_kept_and_becomes_one_event(
    ring: RingBuffer, key: str, value: float
) -> None:
    known: set[str] = set()
    losses = [1.0, value, value, 2.0]
    for step, loss in enumerate(losses, start=1):
        put(ring, float(step), step, **{key: loss, "train/loss_scale": NAN})
    found = block(ring)
    (broken,) = find_broken_losses(found, known, epoch=3)
    assert same(column(found, key), losses)
    assert found.nonfinite[found.keys.index(key)].tolist() == [0, 1, 1, 0]
    assert (broken.ts, broken.step, broken.epoch, broken.kind) == (2.0, 2, 3, "nan")
    assert f"({key})" in broken.text or key == "train/loss"
    put(ring, 5.0, 5, **{key: value})
    assert find_broken_losses(block(ring), known) == [], "only the first one"


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
