"""Rules over a metric, and alert instances that are raised once and cleared once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.alerts.evaluator import AlertInstance, holds
from stepscope.alerts.settings import AlertRule, AlertState

HOT = AlertRule(name="hot", metric="gpu/temp", above=85, clear=80, for_s=30)
SLOW = AlertRule(name="slow", metric="perf/samples_per_sec", below=100, clear=120, for_s=30)
WORSE = AlertRule(name="worse", metric="val/loss", above=2.5, clear=2.5)
BROKEN = AlertRule(name="broken", metric="x", not_finite=True)
LASTING = AlertRule(name="broken", metric="x", not_finite=True, for_s=5)
CONDITIONS = {"H": True, "B": None, "O": False, "?": None}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (HOT, (86, 90), "H"),
        (HOT, (86, 85), "B"),  # with a duration all values must hold
        (HOT, (82,), "B"),
        (HOT, (80, 60), "O"),
        (HOT, (math.nan,), "?"),
        (HOT, (math.nan, 90), "H"),
        (HOT, (math.inf,), "H"),
        (HOT, (), "?"),
        (SLOW, (99, 20), "H"),
        (SLOW, (99, 101), "B"),
        (SLOW, (110,), "B"),
        (SLOW, (120, 500), "O"),
        (WORSE, (1.0, 2.6, 1.0), "H"),  # without a duration one value is enough
        (WORSE, (2.5,), "O"),
        (BROKEN, (1.0, math.nan, 1.0), "H"),
        (BROKEN, (1.0, -math.inf), "H"),
        (BROKEN, (1.0,), "O"),
        (BROKEN, (), "?"),
        (LASTING, (math.nan, 1.0), "O"),
        (LASTING, (1.0, math.nan), "H"),
        (LASTING, (math.nan,), "H"),
    ],
)
def test_the_condition_of_a_rule(rule: AlertRule, values: tuple[float, ...], expected: str) -> None:
    assert holds(rule, values) is CONDITIONS[expected]


@pytest.mark.parametrize(
    ("for_s", "clear_s", "course", "changes"),
    [
        (3, 2, "HHHHHBOOBOOO", {3: AlertState.RAISED, 11: AlertState.CLEARED}),
        # A missing value restarts the wait and clears nothing.
        (2, 1, "H?HHH" + 45 * "?", {4: AlertState.RAISED}),
    ],
)
def test_an_instance_changes_after_its_time(
    for_s: float, clear_s: float, course: str, changes: dict[int, AlertState]
) -> None:
    alarm = AlertInstance(for_s, clear_s)
    found = {now: alarm.update(now, CONDITIONS[kind]) for now, kind in enumerate(course)}
    assert {now: state for now, state in found.items() if state} == changes
    assert alarm.raised == (len(changes) % 2 == 1)


@given(st.lists(st.floats(60, 100), min_size=2, max_size=300))
def test_values_between_the_thresholds_never_flap(temperatures: list[float]) -> None:
    """Between two changes the value has been beyond the other threshold."""
    alarm = AlertInstance(for_s=0, clear_s=0)
    rule = AlertRule(name="hot", metric="gpu/temp", above=85, clear=75)
    last: AlertState | None = None
    for now, value in enumerate(temperatures):
        state = alarm.update(now, holds(rule, (value,)))
        if state is not None:
            assert value > 85 if state is AlertState.RAISED else value <= 75
            assert state is not last
            last = state
