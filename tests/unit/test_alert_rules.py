"""Rules over a metric, and alarms that are raised once and cleared once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.alerts.rules import AlertInstance, AlertRule, AlertState, RuleCondition, condition_of

HOT = AlertRule(name="hot", metric="gpu/temp", above=85, clear=80, for_s=30)
SLOW = AlertRule(name="slow", metric="perf/samples_per_sec", below=100, clear=120, for_s=30)
WORSE = AlertRule(name="worse", metric="val/loss", above=2.5, clear=2.5)
BROKEN = AlertRule(name="broken", metric="x", not_finite=True)


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (HOT, (86, 90), RuleCondition.HOLDS),
        (HOT, (86, 85), RuleCondition.BETWEEN),  # it holds for a time only if all values do
        (HOT, (82,), RuleCondition.BETWEEN),
        (HOT, (80, 60), RuleCondition.OVER),
        (HOT, (math.nan,), RuleCondition.UNKNOWN),
        (HOT, (math.nan, 90), RuleCondition.HOLDS),
        (HOT, (math.inf,), RuleCondition.HOLDS),
        (SLOW, (99, 20), RuleCondition.HOLDS),
        (SLOW, (99, 101), RuleCondition.BETWEEN),
        (SLOW, (110,), RuleCondition.BETWEEN),
        (SLOW, (120, 500), RuleCondition.OVER),
        (WORSE, (1.0, 2.6, 1.0), RuleCondition.HOLDS),  # without a time one value is enough
        (WORSE, (2.5,), RuleCondition.OVER),
        (BROKEN, (1.0, math.nan, 1.0), RuleCondition.HOLDS),
        (BROKEN, (1.0, -math.inf), RuleCondition.HOLDS),
        (BROKEN, (1.0,), RuleCondition.OVER),
    ],
)
def test_a_rule_holds(rule: AlertRule, values: tuple[float, ...], expected: RuleCondition) -> None:
    assert condition_of(rule, values) is expected


def test_a_metric_that_nobody_has_seen_says_nothing() -> None:
    assert condition_of(HOT, ()) is RuleCondition.UNKNOWN
    assert condition_of(BROKEN, ()) is RuleCondition.UNKNOWN


def test_a_loss_that_must_be_broken_for_a_time_may_not_be_whole_again() -> None:
    rule = AlertRule(name="broken", metric="x", not_finite=True, for_s=5)
    assert condition_of(rule, (math.nan, 1.0)) is RuleCondition.OVER
    assert condition_of(rule, (1.0, math.nan)) is RuleCondition.HOLDS
    assert condition_of(rule, (math.nan,)) is RuleCondition.HOLDS


def test_an_alarm_is_raised_after_its_time_and_cleared_after_its_time() -> None:
    alarm = AlertInstance(for_s=3, clear_s=2)
    course = "HHHHHBOOBOOO"
    kinds = {"H": RuleCondition.HOLDS, "B": RuleCondition.BETWEEN, "O": RuleCondition.OVER}
    told = {now: alarm.update(now, kinds[kind]) for now, kind in enumerate(course)}
    assert {now: state for now, state in told.items() if state} == {
        3: AlertState.RAISED,
        11: AlertState.CLEARED,  # what is between has begun the wait anew
    }


def test_a_value_that_goes_missing_begins_the_wait_anew_and_clears_nothing() -> None:
    alarm = AlertInstance(for_s=2, clear_s=1)
    assert alarm.update(0, RuleCondition.HOLDS) is None
    assert alarm.update(1, RuleCondition.UNKNOWN) is None
    assert alarm.update(2, RuleCondition.HOLDS) is None
    assert alarm.update(4, RuleCondition.HOLDS) is AlertState.RAISED
    assert [alarm.update(now, RuleCondition.UNKNOWN) for now in range(5, 50)] == [None] * 45
    assert alarm.raised


LOOKS = st.lists(
    st.tuples(st.floats(0.01, 30), st.sampled_from(list(RuleCondition))), min_size=1, max_size=200
)
TIMES = st.floats(0, 60)


@given(LOOKS, TIMES, TIMES)
def test_alarms_alternate_and_never_change_before_their_time(
    looks: list[tuple[float, RuleCondition]], for_s: float, clear_s: float
) -> None:
    alarm, now = AlertInstance(for_s, clear_s), 0.0
    history: list[tuple[float, RuleCondition]] = []
    changes: list[tuple[float, AlertState]] = []
    for wait_s, condition in looks:
        now += wait_s
        history.append((now, condition))
        state = alarm.update(now, condition)
        if state is None:
            continue
        is_raised = state is AlertState.RAISED
        wanted = RuleCondition.HOLDS if is_raised else RuleCondition.OVER
        needed_s = for_s if is_raised else clear_s
        # The looks that lead up to it all say the same, since long enough.
        since = now
        for at, said in reversed(history):
            if said is not wanted:
                break
            since = at
        assert now - since >= needed_s
        if changes:
            assert now - changes[-1][0] >= needed_s
        changes.append((now, state))
    assert [state for _, state in changes] == [AlertState.RAISED, AlertState.CLEARED] * (
        len(changes) // 2
    ) + [AlertState.RAISED] * (len(changes) % 2)
    assert alarm.raised == bool(len(changes) % 2)


@given(st.lists(st.floats(60, 100), min_size=2, max_size=300))
def test_what_stays_between_the_thresholds_never_flaps(temperatures: list[float]) -> None:
    """Between two changes the value has been beyond the other threshold."""
    alarm = AlertInstance(for_s=0, clear_s=0)
    rule = AlertRule(name="hot", metric="gpu/temp", above=85, clear=75)
    last: AlertState | None = None
    for now, value in enumerate(temperatures):
        state = alarm.update(now, condition_of(rule, (value,)))
        if state is AlertState.RAISED:
            assert value > 85
        elif state is AlertState.CLEARED:
            assert value <= 75
        assert state is None or state is not last
        last = state or last
