"""Who is slow: verdicts and abstentions on the numbers that four ranks have recorded.

`tests/data/recorded/stragglers.json` holds 62 steps of each case of
`benchmarks/straggler_script.py` on two crowded cores; made-up ranks stand for what was not
recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepscope.distributed.stragglers.detect import (
    MIN_STEPS,
    StragglerKind,
    find_straggler,
)
from stepscope.distributed.stragglers.step_phases import (
    OWN,
    RankStepPhases,
    StepPhase,
    rank_times,
)
from stepscope.store.blocks import Floats
from tests.support.recorded_runs import RECORDED

CASES = json.loads((RECORDED / "stragglers.json").read_text())
STRAGGLER, NONE = StragglerKind.STRAGGLER, StragglerKind.NONE


def noise(ranks: int, steps: int, seed: int, size: float = 0.1) -> Floats:
    """Phases that differ by chance alone, and now and then by much, as on a busy machine."""
    rng = np.random.default_rng(seed)
    usual = np.array([0.002, 0.006, 0.008, 0.003, 0.001])[None, :, None]
    own = usual * rng.lognormal(0, size, (ranks, len(OWN), steps))
    spikes = rng.random(own.shape) < 0.02
    return np.asarray(np.where(spikes, own + rng.exponential(0.01, own.shape), own))


def recorded(case: str, *without: str) -> list[RankStepPhases]:
    """What the ranks of a case have recorded, without some of its metrics."""
    ranks = []
    for one in CASES[case]:
        ts = np.array(one["ms"]) / 1e3
        steps = one["first"] + np.arange(len(ts), dtype=float)
        columns = {
            key: np.array(values, dtype=float) / 1e6
            for key, values in one["us"].items()
            if key not in without
        }
        ranks.append(rank_times(one["rank"], steps, ts, columns))
    return ranks


def made(own: Floats) -> list[RankStepPhases]:
    """Ranks with the phases `own` (ranks, 5, steps), in seconds, which meet in every step."""
    arrival = own.sum(axis=1)
    step_time = arrival.max(axis=0) + 0.001
    wait = step_time - arrival
    ts, steps = np.cumsum(step_time), np.arange(own.shape[2], dtype=float)
    return [
        RankStepPhases(rank, steps, ts, step_time, wait[rank], own[rank], len(steps))
        for rank in range(len(own))
    ]


@pytest.mark.parametrize(
    ("case", "kind", "ranks", "phase", "share"),
    [
        ("input", STRAGGLER, (1,), StepPhase.INPUT, 0.1),
        ("forward", STRAGGLER, (0,), StepPhase.FORWARD, 0.2),
        ("backward", STRAGGLER, (3,), StepPhase.BACKWARD, 0.2),
        ("optimizer", STRAGGLER, (2,), StepPhase.OPTIMIZER, 0.1),
        ("none", NONE, (), None, None),
        ("uneven", StragglerKind.UNEVEN, (), StepPhase.FORWARD, 0.45),
        ("communication", StragglerKind.COMMUNICATION, (), StepPhase.COMMUNICATION, 0.37),
    ],
)
def test_recorded_jobs(
    case: str,
    kind: StragglerKind,
    ranks: tuple[int, ...],
    phase: StepPhase | None,
    share: float | None,
) -> None:
    found = find_straggler(recorded(case), world_size=4)
    assert (found.kind, found.ranks, found.phase) == (kind, ranks, phase)
    # Of a step that the other ranks lengthen as well.
    assert found.share == (share and pytest.approx(share, abs=0.05))
    assert (found.next is not None) is (kind is not NONE)
    busy = find_straggler(recorded(case), world_size=4, busy_host=True)
    assert busy.kind is (kind if kind is STRAGGLER else NONE), "a rank without a core is late"


@pytest.mark.parametrize("count", [2, 4])
def test_chance_is_rarely_called_a_straggler(count: int) -> None:
    """Of exchangeable ranks on a machine that disturbs them much."""
    kinds = [find_straggler(made(noise(count, 40, seed, size=0.4))).kind for seed in range(100)]
    assert kinds.count(STRAGGLER) <= 1


LOWER_CLOCK = 0.4 * noise(4, 100, seed=2)[2, 1:3]


@pytest.mark.parametrize(
    ("own", "where", "delay", "ranks", "phase", "text"),
    [
        (noise(6, 100, seed=1), np.s_[[1, 4], 2], 0.004, {1, 4}, StepPhase.BACKWARD, "ranks 1, 4"),
        (noise(4, 100, seed=2), np.s_[2, 1:3], LOWER_CLOCK, {2}, StepPhase.BACKWARD, "in forward"),
    ],
)  # fmt: skip
def test_delays_are_named_with_rank_and_phase(
    own: Floats, where: Any, delay: Any, ranks: set[int], phase: StepPhase, text: str
) -> None:
    own = own.copy()
    own[where] += delay
    found = find_straggler(made(own))
    assert (found.kind, set(found.ranks), found.phase) == (STRAGGLER, ranks, phase)
    assert text in found.text


def long_pause(own: Floats) -> None:
    own[1, 4, 50:53] += 2.0


def long_pauses(own: Floats) -> None:
    for rank in range(1, 4):
        own[rank, 2, 25 * rank : 25 * rank + 10] += 0.1


def most_are_late(own: Floats) -> None:
    own[len(own) // 2 :, 1] += 0.02


def one_is_early_in_turn(own: Floats) -> None:
    turns = np.random.default_rng(1).integers(0, len(own), own.shape[2])
    own[turns, 1, np.arange(own.shape[2])] -= 0.004


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("change", [long_pause, long_pauses, most_are_late, one_is_early_in_turn])
def test_nobody_is_named_for_a_pause_or_for_what_most_ranks_do(
    count: int, change: Callable[[Floats], None]
) -> None:
    own = noise(max(count, 5 if change is long_pauses else 0), 100, seed=1, size=0.03)
    change(own)
    found = find_straggler(made(own))
    assert (found.kind, found.ranks) == (NONE, ())


def test_only_the_newest_steps_count() -> None:
    own = 45 * noise(4, 100, seed=1)  # A step takes a second.
    own[1, 1, :78] += 0.5
    assert find_straggler(made(own[:, :, :78])).ranks == (1,)
    assert find_straggler(made(own)).kind is NONE


def test_waiting_that_no_phase_explains_gets_no_cause() -> None:
    ranks = made(noise(4, 100, seed=6))
    late = replace(ranks[1], wait=np.zeros(100))
    others = [replace(one, wait=one.wait + 0.004) for one in ranks if one is not ranks[1]]
    found = find_straggler([late, *others])
    assert (found.kind, found.ranks) == (NONE, ())
    assert "rank 1" in found.text
    assert "no recorded phase explains it" in found.text


WITHOUT_WAIT = recorded("forward", "perf/comm_wait")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (recorded("forward")[:1], "one process is recorded"),
        (WITHOUT_WAIT, "waiting time of ranks 0, 1, 2, 3 is unknown"),
        ([*recorded("forward")[:3], WITHOUT_WAIT[3]], "waiting time of rank 3 is unknown"),
    ],
)
def test_what_is_missing_is_the_reason(given: list[RankStepPhases], reason: str) -> None:
    found = find_straggler(given)
    assert found.kind is NONE
    assert reason in found.text


def test_too_few_steps_in_common_are_not_compared() -> None:
    own = noise(4, 100, seed=7)
    own[1, 1] += 0.01
    ranks = made(own)
    assert find_straggler(ranks).kind is STRAGGLER
    ahead = replace(ranks[1], steps=ranks[1].steps + 100 - MIN_STEPS + 1)
    short = [replace(one, ts=one.ts / 100) for one in ranks]
    for few in ([ahead, *ranks[:1], *ranks[2:]], short):
        assert find_straggler(few).text.startswith("Not enough data")


# --- the phases of one rank's steps ---

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


def test_without_a_loader_the_time_before_the_model_is_the_input() -> None:
    """Such as making the batch, logging or saving."""
    ranks = [
        of_rank(0, data_wait=np.nan, forward=0.05, comm_wait=0.025),
        of_rank(1, data_wait=np.nan, forward=0.07, backward=0.04, comm_wait=0.005),
    ]
    found = find_straggler(ranks)
    assert (found.ranks, found.phase) == ((1,), StepPhase.INPUT)
    assert "20.0 ms longer before it calls its model" in found.text
