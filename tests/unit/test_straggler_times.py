"""The phases of one rank's steps, by what it has recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepscope.distributed.stragglers.detect import StragglerKind, judge
from stepscope.distributed.stragglers.reader import recent_times
from stepscope.distributed.stragglers.step_phases import OWN, RankStepPhases, StepPhase, rank_times
from stepscope.store import StoreReader
from stepscope.store.blocks import Floats
from tests.support.recorded_runs import Row, write_run

COUNT = 60
STEP = {
    "perf/step_time": 0.1,
    "perf/data_wait": 0.01,
    "perf/forward": 0.02,
    "perf/backward": 0.06,
    "perf/optimizer": 0.01,
    "perf/forward_compute": 0.018,
    "perf/backward_compute": 0.03,
    "perf/comm_wait": 0.025,
}


def of_rank(
    rank: int, *, first: int = 0, iterations: Floats | None = None, **values: float | Floats
) -> RankStepPhases:
    """A rank whose rows begin with step `first`; `values` stand for others of STEP."""
    given = STEP | {f"perf/{name}": value for name, value in values.items()}
    columns = {key: np.broadcast_to(value, COUNT).astype(float) for key, value in given.items()}
    if iterations is not None:
        columns["perf/ddp_iteration"] = iterations
    steps = first + np.arange(COUNT, dtype=float)
    return rank_times(rank, steps, 0.1 * steps, columns)


def own(times: RankStepPhases, phase: StepPhase) -> Floats:
    return times.own[OWN.index(phase)]


def test_ranks_are_aligned_by_ddps_iteration() -> None:
    """Rank 1 has counted a step more, of another model."""
    iterations = np.arange(COUNT, dtype=float)
    rng = np.random.default_rng(1)
    longer = rng.random(COUNT) * 0.03
    late = rng.random(COUNT) < 0.5
    waits = np.where(late, 0.001, 0.001 + longer), np.where(late, 0.001 + longer, 0.001)
    ranks = [
        of_rank(0, iterations=iterations, comm_wait=waits[0]),
        of_rank(1, first=1, iterations=iterations, comm_wait=waits[1]),
    ]
    for one, row in zip(ranks, waits, strict=True):
        np.testing.assert_array_equal(one.steps, iterations[1:])
        np.testing.assert_array_equal(one.wait, row[1:])
    assert judge(ranks).steps == COUNT - 1


def test_steps_are_numbered_by_iterations_of_the_last_model_or_else_counted() -> None:
    assert of_rank(0, first=7).steps.tolist() == [7.0 + i for i in range(COUNT - 1)]
    iterations = np.append(np.arange(500.0, 530), np.arange(30.0))
    assert of_rank(0, iterations=iterations).steps.tolist() == list(range(30))


def test_waiting_below_zero_is_not_known() -> None:
    wait = np.where(np.arange(COUNT) % 2 == 0, -0.01, 0.02)
    found = of_rank(0, comm_wait=wait)
    assert len(found.steps) == COUNT / 2
    assert (found.wait == 0.02).all()


def test_of_batches_that_are_not_averaged_all_of_backward_counts() -> None:
    """DDP knows the last of four: 8 ms of the 35 in which backward did not wait."""
    found = of_rank(0, backward_compute=0.008)
    np.testing.assert_allclose(own(found, StepPhase.BACKWARD), 0.035)
    columns = {key: np.full(3, value) for key, value in STEP.items()}
    on_gpu = rank_times(0, np.arange(3.0), np.arange(3.0), columns, on_gpu=True)
    np.testing.assert_allclose(own(on_gpu, StepPhase.BACKWARD), 0.03)  # the host only launches it
    without = of_rank(0, backward=np.nan)
    np.testing.assert_allclose(own(without, StepPhase.BACKWARD), 0.03)


def test_one_of_four_averaged_batches_stands_for_all() -> None:
    """Each rank's step has four of DDP's iterations, of which every third is sampled."""
    iterations = np.full(COUNT, np.nan)
    iterations[1:] = 3 * ((4 * np.arange(1, COUNT) - 1) // 3)
    given = {"backward_compute": 0.005, "comm_wait": 0.0045}
    found = of_rank(0, iterations=iterations, **given)
    assert found.per_step == 4
    np.testing.assert_allclose(found.wait, 0.018)
    np.testing.assert_allclose(own(found, StepPhase.BACKWARD), 0.02)
    told = judge([found, of_rank(1, iterations=iterations, **given)])
    assert told.text.endswith(
        "Gradients are reduced 4 times per step, of which one was examined: "
        "a delay in the others may be missed."
    )
    slow = of_rank(
        1, iterations=iterations, forward=0.036, backward_compute=0.005, comm_wait=0.0005
    )
    named = judge([found, slow])
    assert (named.ranks, named.phase) == ((1,), StepPhase.FORWARD)
    assert named.share == pytest.approx(0.16)


@pytest.mark.parametrize("last", [np.inf, 1e300, np.nan])
def test_numbers_that_nobody_can_have_written_break_nothing(last: float) -> None:
    iterations = np.arange(COUNT, dtype=float)
    iterations[-1] = last
    found = of_rank(0, iterations=iterations, ddp_models=last)
    assert found.per_step == found.models == 1
    columns = {key: np.full(3, value) for key, value in STEP.items()}
    steps = np.array([1.0, 2.0, last])
    assert rank_times(0, steps, np.arange(3.0), columns).per_step == 1
    validation = np.arange(COUNT) + np.where(np.arange(COUNT) > 20, 500.0, 0.0)
    assert of_rank(0, iterations=validation).per_step == 1


def test_two_models_in_ddp_are_said(tmp_path: Path) -> None:
    ranks = []
    for rank in (0, 1):
        rows: list[Row] = [
            (0.1 * step, step, STEP if step < 70 else STEP | {"perf/ddp_models": 2.0})
            for step in range(70)
        ]
        without = {key: value for key, value in STEP.items() if key != "perf/comm_wait"}
        rows += [(0.1 * step, step, without | {"perf/ddp_models": 2.0}) for step in range(70, 200)]
        folder = write_run(tmp_path / str(rank), {"world_size": 2}, steps=rows)
        with StoreReader(folder) as reader:
            ranks.append(recent_times(reader, 0, {"device": "cpu", "rank": rank}))
    assert [one.models for one in ranks] == [2, 2]
    found = judge(ranks)
    assert found.kind is StragglerKind.NONE
    assert "2 DistributedDataParallel models are trained" in found.text


def test_one_model_after_two_is_looked_at_again() -> None:
    models = np.where(np.arange(COUNT) < 10, 2.0, np.nan)
    wait = np.where(np.arange(COUNT) < 10, np.nan, 0.02)
    found = of_rank(0, ddp_models=models, comm_wait=wait)
    assert (found.models, len(found.steps)) == (1, COUNT - 10)


def test_without_a_loader_no_loader_is_spoken_of() -> None:
    """What comes before the model is making the batch, logging or saving."""
    ranks = [
        of_rank(0, data_wait=np.nan, forward=0.05, comm_wait=0.025),
        of_rank(1, data_wait=np.nan, forward=0.07, backward=0.04, comm_wait=0.005),
    ]
    found = judge(ranks)
    assert (found.ranks, found.phase) == ((1,), StepPhase.INPUT)
    assert "it takes 20.0 ms longer before it calls its model than rank 0 does" in found.text
    assert found.next is not None
    assert "workers" not in found.next
    assert "logging, saving, validation" in found.next
