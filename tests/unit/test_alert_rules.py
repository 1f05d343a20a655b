"""Rules over a metric, and alert instances that are raised once and cleared once."""

from __future__ import annotations

import math

import pytest

from stepscope.alerts.settings import AlertInstance, AlertRule, AlertState, holds

HOT = AlertRule(name="hot", metric="gpu/temp", above=85, for_s=30)
SLOW = AlertRule(name="slow", metric="perf/samples_per_sec", below=100, for_s=30)
WORSE = AlertRule(name="worse", metric="val/loss", above=2.5)
BROKEN = AlertRule(name="broken", metric="x", not_finite=True)
LASTING = AlertRule(name="broken", metric="x", not_finite=True, for_s=5)
CONDITIONS = {"H": True, "O": False, "?": None}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (HOT, (86, 90), "H"),
        (HOT, (86, 85), "O"),  # with a duration all values must hold
        (HOT, (math.nan,), "?"),
        (HOT, (math.nan, 90), "H"),
        (HOT, (), "?"),
        (SLOW, (99, 100), "O"),
        (WORSE, (1.0, 2.6, 1.0), "H"),  # without a duration one value is enough
        (WORSE, (2.5,), "O"),
        (BROKEN, (1.0, math.nan, 1.0), "H"),
        (BROKEN, (), "?"),
        (LASTING, (math.nan, 1.0), "O"),
        (LASTING, (1.0, math.nan), "H"),
    ],
)
def test_the_condition_of_a_rule(rule: AlertRule, values: tuple[float, ...], expected: str) -> None:
    assert holds(rule, values) is CONDITIONS[expected]


@pytest.mark.parametrize(
    ("for_s", "clear_s", "course", "changes"),
    [
        (3, 2, "HHHHHHOOHOOO", {3: AlertState.RAISED, 11: AlertState.CLEARED}),
        # A missing value restarts the wait and clears nothing.
        (2, 1, "H?HHH" + 45 * "?", {4: AlertState.RAISED}),
    ],
)
def test_an_instance_changes_after_its_time(
    for_s: float, clear_s: float, course: str, changes: dict[int, AlertState]
) -> None:
    instance = AlertInstance(for_s, clear_s)
    found = {now: instance.update(now, CONDITIONS[kind]) for now, kind in enumerate(course)}
    assert {now: state for now, state in found.items() if state} == changes
    assert instance.raised == (len(changes) % 2 == 1)
