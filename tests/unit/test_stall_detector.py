"""When a run without a step is stalled, by its own pace so far."""

from __future__ import annotations

import pytest

from stepscope.common.stall_detector import PATIENCE, WARM_STEPS, StallDetector, StepGap

LEAST_S = 5.0


def stalled(detector: StallDetector, now: float, step: int, *, work: int = 0) -> bool:
    gap = detector.update(now, step, due=True, work=work)
    return gap is not None and gap.is_stall(LEAST_S)


@pytest.fixture
def detector() -> StallDetector:
    """A run that has made ten steps a second for 9 s."""
    made = StallDetector()
    assert not any(stalled(made, float(second), 10 * second) for second in range(10))
    return made


@pytest.mark.parametrize(
    ("gap", "min_s", "is_stall"),
    [
        (StepGap(5.0, 0.1, 0.0), LEAST_S, True),
        (StepGap(4.9, 0.1, 0.0), LEAST_S, False),
        (StepGap(39.0, 4.0, 0.0), LEAST_S, False),  # ten usual steps
        (StepGap(40.0, 4.0, 0.0), LEAST_S, True),
        (StepGap(40.0, 0.1, 30.0), LEAST_S, False),  # such as for a checkpoint
        (StepGap(45.0, 0.1, 30.0), LEAST_S, True),
    ],
)
def test_a_stall_is_longer_than_usual(gap: StepGap, min_s: float, is_stall: bool) -> None:
    assert gap.is_stall(min_s) is is_stall


def test_steps_that_stop_are_a_stall_and_their_pace_is_known(detector: StallDetector) -> None:
    assert [stalled(detector, second, 90) for second in (13.9, 14.0)] == [False, True]
    gap = detector.update(15.0, 91, due=True, work=0)
    assert gap is not None
    assert (gap.seconds, gap.usual_s, gap.longest_s) == (0.0, pytest.approx(0.1), 6.0)


def test_the_first_steps_other_work_and_pauses_are_no_stall(detector: StallDetector) -> None:
    first = StallDetector()
    assert not any(stalled(first, float(second), WARM_STEPS - 1) for second in range(600))
    assert not any(stalled(detector, float(second), 90, work=second) for second in range(10, 60))
    for second in range(60, 100):  # a pause
        assert detector.update(float(second), 90, due=False, work=59) is None
    assert not stalled(detector, 103.0, 90, work=59)
    assert stalled(detector, 104.0, 90, work=59)


@pytest.mark.parametrize(("ends_gap", "longest_s"), [(False, 0.0), (True, 6.0)])
def test_collectives_that_go_on_begin_the_gap_anew(
    detector: StallDetector, ends_gap: bool, longest_s: float
) -> None:
    """A long validation with a collective per batch must not count as one long gap."""
    detector.add_collective(ends_gap=ends_gap)
    gap = detector.update(15.0, 90, due=True, work=0)
    assert gap == StepGap(0.0, pytest.approx(0.1), longest_s)
    assert stalled(detector, 15.0 + max(LEAST_S, PATIENCE * longest_s), 90)
