"""Slots become rows: wide rows joined, step times worked out, broken losses told once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.store import SeriesBlock
from stepscope.store.ring import RingBuffer
from stepscope.store.step_blocks import RESTART, StepBlockBuilder

NAN = math.nan


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[RingBuffer]:
    ring = RingBuffer(tmp_path / "rank0.ring")
    yield ring
    ring.close()


def put(ring: RingBuffer, ts: float, step: int, timed: bool = False, **values: float) -> None:
    layout = ring.layout(tuple(values), timed)
    assert layout is not None
    ring.put(layout, ts, step, values.values())


def block(ring: RingBuffer, rows: StepBlockBuilder | None = None) -> SeriesBlock:
    pending = ring.pending()
    ring.release(pending)
    return (rows or StepBlockBuilder()).block(pending.slots, ring.layouts())


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
    assert (found.ts.tolist(), found.step.tolist()) == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])


def test_slots_of_one_moment_and_step_are_one_row(ring: RingBuffer) -> None:
    put(ring, 1.0, 1, a=1.0)
    put(ring, 1.0, 1, b=2.0)
    put(ring, 1.0, 2, a=3.0)
    found = block(ring)
    assert len(found) == 2
    assert same(column(found, "a"), [1.0, 3.0])
    assert same(column(found, "b"), [2.0, NAN])


def test_a_timed_row_gets_its_step_time_and_rate(ring: RingBuffer) -> None:
    rows = StepBlockBuilder()
    put(ring, 10.0, 1, timed=True, **{"perf/samples": 8.0})
    put(ring, 10.5, 2, timed=True, **{"perf/samples": 8.0})
    put(ring, 10.6, 2, **{"val/loss": 3.0})
    put(ring, 11.0, 3, timed=True, **{"perf/samples": NAN})
    put(ring, 11.25, 4, timed=True)
    first = block(ring, rows)
    put(ring, 11.5, 5, timed=True, **{"train/loss": 1.0})
    second = block(ring, rows)
    assert same(column(first, "perf/step_time"), [NAN, 0.5, NAN, 0.5, 0.25])
    assert same(column(first, "perf/samples_per_sec"), [NAN, 16.0, NAN, NAN, NAN])
    assert (first.odd.sum(), "perf/samples" in first.keys) == (0, False)
    assert same(column(second, "perf/step_time"), [0.25]), "from the batch before"


def test_what_a_row_says_of_its_own_step_time_and_rate_stays(ring: RingBuffer) -> None:
    put(ring, 1.0, 1, timed=True, **{"perf/samples": 8.0})
    put(ring, 2.0, 2, timed=True, **{"perf/samples": 8.0})
    own = {"perf/step_time": 0.25, "perf/samples_per_sec": 32.0}
    put(ring, 4.0, 3, timed=True, **{"perf/samples": 8.0, **own})
    found = block(ring)
    assert same(column(found, "perf/step_time"), [NAN, 1.0, 0.25])
    assert same(column(found, "perf/samples_per_sec"), [NAN, 8.0, 32.0])


def test_a_pause_is_not_step_time(ring: RingBuffer) -> None:
    put(ring, 1.0, 1, timed=True, a=1.0)
    put(ring, 60.0, 1, timed=True, **{RESTART: 0.0})
    put(ring, 60.25, 2, timed=True, a=1.0)
    found = block(ring)
    assert RESTART not in found.keys
    assert found.step.tolist() == [1.0, 2.0]
    assert same(column(found, "perf/step_time"), [NAN, 0.25])


def test_rows_out_of_order_have_no_negative_time_and_no_falling_axis(ring: RingBuffer) -> None:
    put(ring, 10.0, 2, timed=True, a=1.0)
    put(ring, 4.0, 1, timed=True, a=1.0)
    found = block(ring)
    assert same(column(found, "perf/step_time"), [NAN, NAN])
    assert (found.ts.tolist(), found.step.tolist()) == ([10.0, 10.0], [2.0, 2.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_loss_is_kept_and_told_once(ring: RingBuffer, value: float) -> None:
    rows = StepBlockBuilder()
    losses: list[Any] = [1.0, value, value, 2.0]
    for step, loss in enumerate(losses, start=1):
        put(ring, float(step), step, **{"train/loss": loss, "a": 1.0})
    found = block(ring, rows)
    assert same(column(found, "train/loss"), losses)
    assert found.odd[found.keys.index("train/loss")].tolist() == [0, 1, 1, 0]
    assert [broken.step for broken in rows.broken] == [2]
    rows.broken.clear()
    put(ring, 5.0, 5, **{"train/loss": value})
    block(ring, rows)
    put(ring, 6.0, 6, **{"train/loss": value})
    block(ring, rows)
    assert [broken.step for broken in rows.broken] == [5]


def test_the_loss_of_every_optimizer_is_watched(ring: RingBuffer) -> None:
    rows = StepBlockBuilder()
    for step, loss in enumerate((1.0, NAN, NAN), start=1):
        put(ring, float(step), step, **{"train/loss": 1.0, "train/loss.optimizer1": loss})
        put(ring, float(step), step, **{"train/loss_scale": NAN})
        block(ring, rows)
    (broken,) = rows.broken
    assert broken.text == "The loss (train/loss.optimizer1) is nan at step 2"
