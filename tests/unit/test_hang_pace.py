"""When a rank has made no step for far longer than usual."""

from __future__ import annotations

from stepscope.distributed.hangs.watchdog import LEAST_S, PATIENCE, StallTimer


def run(pace: StallTimer, seconds: range, step_s: float) -> None:
    for second in seconds:
        assert pace.look(float(second), int(second / step_s), due=True) is None


def test_fast_steps_hang_after_the_least_time() -> None:
    pace = StallTimer()
    run(pace, range(10), 0.1)
    waits = [pace.look(float(second), 90, due=True) for second in range(10, 17)]
    assert waits == [None] * 4 + [LEAST_S, 6.0, 7.0]


def test_slow_steps_have_ten_times_their_own_time() -> None:
    pace = StallTimer()
    run(pace, range(41), 4.0)
    assert pace.usual_s == 4.0
    assert [pace.look(40 + wait, 10, due=True) for wait in (39.0, 40.0)] == [None, 40.0]


def test_the_first_steps_may_take_as_long_as_they_like() -> None:
    pace = StallTimer()
    assert all(pace.look(float(second), 2, due=True) is None for second in range(600))


def test_what_is_not_due_does_not_count() -> None:
    pace = StallTimer()
    run(pace, range(10), 0.1)
    for second in range(10, 100):  # a pause
        assert pace.look(float(second), 90, due=False) is None
    assert pace.look(103.0, 90, due=True) is None
    assert pace.look(104.0, 90, due=True) == LEAST_S


def test_other_work_counts_as_a_sign() -> None:
    pace = StallTimer()
    run(pace, range(10), 0.1)
    assert all(
        pace.look(float(second), 90, due=True, sign=second) is None for second in range(10, 60)
    )


def test_a_wait_that_ended_by_itself_is_waited_for_again() -> None:
    """Such as that for a checkpoint every thousand steps."""
    pace = StallTimer()
    run(pace, range(10), 0.1)
    assert pace.look(20.0, 90, due=True) is not None
    assert pace.look(21.0, 91, due=True) is None
    assert pace.longest_s == 12.0
    run(pace, range(22, 30), 0.1)
    last = int(29 / 0.1)
    assert pace.look(29 + PATIENCE * 12 - 1, last, due=True) is None
    assert pace.look(29 + PATIENCE * 12, last, due=True) is not None


def test_collectives_that_go_on_begin_the_wait_anew() -> None:
    pace = StallTimer()
    run(pace, range(10), 0.1)
    assert pace.look(15.0, 90, due=True) is not None
    pace.moved(15.0, 1.0, waited=False)
    assert (pace.since, pace.longest_s) == (14.0, 0.0)
    assert pace.look(18.0, 90, due=True) is None
    assert pace.look(19.0, 90, due=True) == LEAST_S
    pace.moved(19.0, 60.0, waited=False)
    assert pace.since == 14.0, "older than what is known"
    pace.moved(19.0, -60.0, waited=False)
    assert pace.since == 19.0, "the clock was set back"


def test_a_wait_for_a_collective_that_ended_by_itself_is_waited_for_again() -> None:
    """Such as that for a long batch of a validation."""
    pace = StallTimer()
    run(pace, range(10), 0.1)
    assert pace.look(16.0, 90, due=True) is not None
    pace.moved(16.0, 1.0, waited=True)
    assert (pace.longest_s, pace.limit_s) == (6.0, PATIENCE * 6.0)
