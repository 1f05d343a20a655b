"""The phases of one rank's steps, by what it has recorded."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.distributed.stragglers.detect import find_straggler
from stepscope.distributed.stragglers.step_phases import OWN, RankStepPhases, StepPhase, rank_times
from stepscope.store.blocks import Floats

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


def test_the_rows_around_a_step_belong_to_it() -> None:
    """The optimizer before a step delays it, and DDP writes of it one row later."""
    steps = np.arange(5.0)
    given = {
        "perf/step_time": np.full(5, 0.1),
        "perf/optimizer": np.array([1.0, 2, 3, 4, 5]),
        "perf/comm_wait": np.array([np.nan, 10, np.nan, 30, 40]),
    }
    found = rank_times(0, steps, steps, given)
    assert found.steps.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(own(found, StepPhase.OPTIMIZER), [np.nan, 2, 3])
    gap = rank_times(0, np.array([0.0, 1, 3, 4, 5]), steps, given)  # step 2 was not recorded
    np.testing.assert_array_equal(own(gap, StepPhase.OPTIMIZER), [np.nan, np.nan, 3])


def test_steps_are_numbered_by_iterations_of_the_last_model_or_else_counted() -> None:
    assert of_rank(0, first=7).steps.tolist() == [7.0 + i for i in range(COUNT - 1)]
    iterations = np.append(np.arange(500.0, 530), np.arange(30.0))
    assert of_rank(0, iterations=iterations).steps.tolist() == list(range(30))


def test_of_batches_that_are_not_averaged_all_of_backward_counts() -> None:
    """DDP knows the last of four: 8 ms of the 35 in which backward did not wait."""
    found = of_rank(0, backward_compute=0.008)
    np.testing.assert_allclose(own(found, StepPhase.BACKWARD), 0.035)
    columns = {key: np.full(3, value) for key, value in STEP.items()}
    on_gpu = rank_times(0, np.arange(3.0), np.arange(3.0), columns, on_gpu=True)
    np.testing.assert_allclose(own(on_gpu, StepPhase.BACKWARD), 0.03)  # the host only launches it
    without = of_rank(0, backward=np.nan)
    np.testing.assert_allclose(own(without, StepPhase.BACKWARD), 0.03)


@pytest.mark.parametrize("last", [np.inf, np.nan, -1.0])
def test_numbers_that_nobody_can_have_written_break_nothing(last: float) -> None:
    iterations = np.arange(COUNT, dtype=float)
    iterations[-1] = last
    columns = {key: np.full(3, value) for key, value in STEP.items()}
    steps = np.array([1.0, 2.0, last])
    for times in (of_rank(0, iterations=iterations), rank_times(0, steps, np.arange(3.0), columns)):
        assert find_straggler([times, of_rank(1)]).ranks == ()


def test_without_a_loader_the_time_before_the_model_is_the_input() -> None:
    """Such as making the batch, logging or saving."""
    ranks = [
        of_rank(0, data_wait=np.nan, forward=0.05, comm_wait=0.025),
        of_rank(1, data_wait=np.nan, forward=0.07, backward=0.04, comm_wait=0.005),
    ]
    found = find_straggler(ranks)
    assert (found.ranks, found.phase) == ((1,), StepPhase.INPUT)
    assert "20.0 ms longer before it calls its model" in found.text
