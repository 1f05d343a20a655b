"""Slots become rows: wide rows joined, counts become rates, a broken loss one event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stepscope.store import SeriesBlock
from stepscope.store.blocks import STEPS, find_broken_losses, series_blocks
from stepscope.store.ring import RingBuffer

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
