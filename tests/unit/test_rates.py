"""Bytes a second from counters: over the time that passed, across wraps and resets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.gpu.nvml_queries import FASTEST
from stepscope.gpu.nvml_reader import MAY_HAVE_WRAPPED, ONE_READING, UNWATCHED_S, WRAP, CounterRate

STEPS = st.lists(st.integers(0, WRAP - 1), min_size=1, max_size=30)
TICK_S = 0.1


def read(rate: CounterRate, begin: int, steps: list[int], bits: int) -> int:
    """Read a counter that counts these steps, a tick apart; return what it counted."""
    counter = begin
    rate.add(0.0, counter % 2**bits)
    for i, step in enumerate(steps, 1):
        counter += step
        rate.add(i * TICK_S, counter % 2**bits)
    return counter - begin


@given(begin=st.integers(0, WRAP - 1), steps=STEPS)
def test_the_rate_is_what_was_counted_over_the_time(begin: int, steps: list[int]) -> None:
    rate = CounterRate(wraps=True)
    whole = read(rate, begin, steps, bits=32)
    assert rate.take() == pytest.approx(whole / (len(steps) * TICK_S), abs=0.51)
    assert rate.reason is None


@given(begin=st.integers(0, 2**62), steps=STEPS)
def test_a_64_bit_counter_is_not_taken_for_a_wrapped_one(begin: int, steps: list[int]) -> None:
    rate = CounterRate(wraps=False)
    whole = read(rate, begin, steps, bits=64)
    assert rate.take() == pytest.approx(whole / (len(steps) * TICK_S), abs=0.51)


@given(readings=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=30), wraps=st.booleans())
def test_whatever_a_counter_does_a_rate_is_possible(readings: list[int], wraps: bool) -> None:
    rate = CounterRate(wraps=wraps)
    for i, counter in enumerate(readings):
        rate.add(i * TICK_S, counter)
    found = rate.take()
    assert found is None or 0 <= found <= FASTEST


def test_a_rate_is_of_the_time_since_the_last_one() -> None:
    rate = CounterRate(wraps=False)
    rate.add(0.0, 0)
    assert (rate.take(), rate.reason) == (None, ONE_READING)
    for now, counter in ((0.0, 6), (1.0, 506), (2.0, 1006)):  # the clock may stand still
        rate.add(now, counter)
    assert rate.take() == 500
    assert rate.take() is None
    rate.add(4.0, 1006)
    assert rate.take() == 0


@pytest.mark.parametrize(("seconds", "known"), [(UNWATCHED_S, True), (UNWATCHED_S * 1.01, False)])
def test_a_32_bit_counter_has_to_be_watched_closely(seconds: float, known: bool) -> None:
    rate = CounterRate(wraps=True)
    rate.add(0.0, 1000)
    rate.add(seconds, 2000)
    assert (rate.take() is not None) is known
    assert rate.reason == (None if known else MAY_HAVE_WRAPPED)


def test_a_counter_beyond_32_bits_may_be_read_seldom() -> None:
    rate = CounterRate(wraps=True)
    rate.add(0.0, WRAP)
    rate.add(10.0, WRAP + 1000)
    assert rate.take() == 100


def test_a_reset_counter_begins_anew() -> None:
    rate = CounterRate(wraps=False)
    for now, counter in ((0.0, 10**12), (1.0, 50), (2.0, 150)):
        rate.add(now, counter)
    assert rate.take() == 100


def test_an_interval_that_may_hide_a_wrap_is_left_out_of_the_mean() -> None:
    rate = CounterRate(wraps=True)
    for now, counter in ((0.0, 0), (1.0, 10**9), (1.1, 10**9 + 500)):
        rate.add(now, counter)
    assert rate.take() == pytest.approx(5000)
