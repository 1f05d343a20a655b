"""Energy of a window: the counter first, then power, else a reason."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.sampling.energy import energy_joules

NAN = float("nan")


def test_the_counter_is_preferred() -> None:
    ts = np.arange(0, 10.05, 0.1)
    counter = np.where(np.arange(ts.size) % 5 == 0, 1000 + 300 * ts, NAN)  # read at 2 Hz
    joules, how = energy_joules(ts, np.full(ts.size, 250.0), counter)
    assert how == "counter"
    assert joules == pytest.approx(3000)


def test_power_is_integrated_without_a_counter() -> None:
    ts = np.arange(0, 10.05, 0.1)
    power = 100 + 10 * ts
    joules, how = energy_joules(ts, power, np.full(ts.size, NAN))
    assert how == "power"
    assert joules == pytest.approx(1500)


def test_missing_values_may_be_none() -> None:
    assert energy_joules([0, 1, 2], [100, None, 100], [5, None, 255]) == (250.0, "counter")
    joules, how = energy_joules([0, 0.5, 1, 1.5, 2], [100, None, 100, 100, 100], [None] * 5)
    assert (joules, how) == (200.0, "power")


@pytest.mark.parametrize("counter", [[9000.0, 10.0, 30.0], [NAN, NAN, 30.0]])
def test_a_reset_or_partial_counter_is_not_used(counter: list[float]) -> None:
    assert energy_joules([0, 1, 2], [50.0, 50.0, 50.0], counter) == (100.0, "power")


def test_a_counter_that_misses_the_end_is_not_used() -> None:
    counter = [0.0, 100.0, NAN, NAN, NAN]
    assert energy_joules([0, 1, 2, 3, 4], [50.0] * 5, counter) == (200.0, "power")


def test_a_short_window_has_no_energy() -> None:
    assert energy_joules([0, 1.9], [100, 100], [0, 190]) == (None, "too short")
    assert energy_joules([], [], []) == (None, "too short")


@pytest.mark.parametrize(
    "power", [[100.0, NAN, 100.0, 100.0], [NAN, NAN, 100.0, 100.0], [100.0, 100.0, NAN, NAN]]
)
def test_a_gap_in_power_is_a_reason(power: list[float]) -> None:
    joules, how = energy_joules([0, 1, 2, 3], power, [NAN] * 4)
    assert joules is None
    assert "gaps over 1 s" in how
