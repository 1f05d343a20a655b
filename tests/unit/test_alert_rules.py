"""Rules over a metric, and alarms that are raised once and cleared once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.alerts.rules import (
    AlertInstance,
    AlertRule,
    AlertState,
    Comparison,
    RuleMatch,
    WindowStats,
    condition_of,
)

HOT = AlertRule(name="hot", metric="gpu/temp", threshold=85, clear=80, for_s=30)
SLOW = AlertRule(
    name="slow",
    metric="perf/samples_per_sec",
    comparison=Comparison.BELOW,
    threshold=100,
    clear=120,
    for_s=30,
)
WORSE = AlertRule(name="worse", metric="val/loss", threshold=2.5, clear=2.5)
BROKEN = AlertRule(name="broken", metric="x", comparison=Comparison.NOT_FINITE)


def span(*values: float) -> WindowStats:
    found = WindowStats.of(values[0], 0)
    for step, value in enumerate(values[1:], 1):
        found = found.then(WindowStats.of(value, step))
    return found


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (HOT, (86, 90), RuleMatch.HOLDS),
        (HOT, (86, 85), RuleMatch.BETWEEN),  # it holds for a time only if all values do
        (HOT, (82,), RuleMatch.BETWEEN),
        (HOT, (80, 60), RuleMatch.OVER),
        (HOT, (math.nan,), RuleMatch.UNKNOWN),
        (HOT, (math.nan, 90), RuleMatch.HOLDS),
        (HOT, (math.inf,), RuleMatch.HOLDS),
        (SLOW, (99, 20), RuleMatch.HOLDS),
        (SLOW, (99, 101), RuleMatch.BETWEEN),
        (SLOW, (110,), RuleMatch.BETWEEN),
        (SLOW, (120, 500), RuleMatch.OVER),
        (WORSE, (1.0, 2.6, 1.0), RuleMatch.HOLDS),  # without a time one value is enough
        (WORSE, (2.5,), RuleMatch.OVER),
        (BROKEN, (1.0, math.nan, 1.0), RuleMatch.HOLDS),
        (BROKEN, (1.0, -math.inf), RuleMatch.HOLDS),
        (BROKEN, (1.0,), RuleMatch.OVER),
    ],
)
def test_a_rule_holds(rule: AlertRule, values: tuple[float, ...], expected: RuleMatch) -> None:
    assert condition_of(rule, span(*values)) is expected


def test_a_metric_that_nobody_has_seen_says_nothing() -> None:
    assert condition_of(HOT, None) is RuleMatch.UNKNOWN
    assert condition_of(BROKEN, None) is RuleMatch.UNKNOWN


def test_a_loss_that_must_be_broken_for_a_time_may_not_be_whole_again() -> None:
    rule = AlertRule(name="broken", metric="x", comparison=Comparison.NOT_FINITE, for_s=5)
    assert condition_of(rule, span(math.nan, 1.0)) is RuleMatch.OVER
    assert condition_of(rule, span(1.0, math.nan)) is RuleMatch.HOLDS
    assert condition_of(rule, span(1.0, math.nan).held()) is RuleMatch.HOLDS


def test_a_span_knows_the_first_odd_value_and_its_step() -> None:
    found = span(1.0, math.nan, math.inf, 3.0)
    assert (found.low, found.high, found.last, found.odd_step) == (1.0, math.inf, 3.0, 1)
    assert found.odd is not None
    assert math.isnan(found.odd)
    assert found.held() == WindowStats(3.0, 3.0, 3.0)


def test_an_alarm_is_raised_after_its_time_and_cleared_after_its_time() -> None:
    alarm = AlertInstance(for_s=3, clear_s=2)
    course = "HHHHHBOOBOOO"
    kinds = {"H": RuleMatch.HOLDS, "B": RuleMatch.BETWEEN, "O": RuleMatch.OVER}
    told = {now: alarm.judge(now, kinds[kind]) for now, kind in enumerate(course)}
    assert {now: state for now, state in told.items() if state} == {
        3: AlertState.RAISED,
        11: AlertState.CLEARED,  # what is between has begun the wait anew
    }


def test_a_value_that_goes_missing_begins_the_wait_anew_and_clears_nothing() -> None:
    alarm = AlertInstance(for_s=2, clear_s=1)
    assert alarm.judge(0, RuleMatch.HOLDS) is None
    assert alarm.judge(1, RuleMatch.UNKNOWN) is None
    assert alarm.judge(2, RuleMatch.HOLDS) is None
    assert alarm.judge(4, RuleMatch.HOLDS) is AlertState.RAISED
    assert [alarm.judge(now, RuleMatch.UNKNOWN) for now in range(5, 50)] == [None] * 45
    assert alarm.raised


LOOKS = st.lists(
    st.tuples(st.floats(0.01, 30), st.sampled_from(list(RuleMatch))), min_size=1, max_size=200
)
TIMES = st.floats(0, 60)


@given(LOOKS, TIMES, TIMES)
def test_alarms_alternate_and_never_change_before_their_time(
    looks: list[tuple[float, RuleMatch]], for_s: float, clear_s: float
) -> None:
    alarm, now = AlertInstance(for_s, clear_s), 0.0
    history: list[tuple[float, RuleMatch]] = []
    changes: list[tuple[float, AlertState]] = []
    for wait_s, condition in looks:
        now += wait_s
        history.append((now, condition))
        state = alarm.judge(now, condition)
        if state is None:
            continue
        wanted, needed_s = (
            (RuleMatch.HOLDS, for_s) if state is AlertState.RAISED else (RuleMatch.OVER, clear_s)
        )
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
    rule = AlertRule(name="hot", metric="gpu/temp", threshold=85, clear=75)
    last: AlertState | None = None
    for now, value in enumerate(temperatures):
        state = alarm.judge(now, condition_of(rule, WindowStats.of(value, 0)))
        if state is AlertState.RAISED:
            assert value > 85
        elif state is AlertState.CLEARED:
            assert value <= 75
        assert state is None or state is not last
        last = state or last


@given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=20), st.integers(0, 19))
def test_spans_put_together_are_those_of_all_values(values: list[float], cut: int) -> None:
    cut %= len(values)
    parts = [part for part in (values[:cut], values[cut:]) if part]
    spans = [span(*part) for part in parts]
    whole = spans[0] if len(spans) == 1 else spans[0].then(spans[1])
    known = [value for value in values if not math.isnan(value)]
    assert whole.low == min(known, default=None)
    assert whole.high == max(known, default=None)
    assert (whole.odd is None) == all(map(math.isfinite, values))
    assert whole.last == values[-1] or math.isnan(values[-1])
    at_once = WindowStats.of_all(values)
    assert (at_once.low, at_once.high) == (whole.low, whole.high)
    assert (at_once.odd is None) == (whole.odd is None)
