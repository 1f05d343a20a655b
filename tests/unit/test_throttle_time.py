"""How long clocks were lowered, by reason, from the driver's counters."""

from __future__ import annotations

from stepscope.gpu.device_events import REASONS, throttle_text, throttle_times, throttle_total

NOTHING = dict.fromkeys(REASONS, 5.0)


def test_times_are_differences_in_words() -> None:
    after = NOTHING | {"gpu/throttle_hw_thermal": 17.0, "gpu/throttle_power": 305.0}
    times = throttle_times(NOTHING, after)
    assert {time.key: time.seconds for time in times} == {
        "gpu/throttle_hw_thermal": 12.0,
        "gpu/throttle_sw_thermal": 0.0,
        "gpu/throttle_brake": 0.0,
        "gpu/throttle_power": 300.0,
    }
    assert throttle_text(times, 600.0) == (
        "In 10 min 00 s: 12 s (2%) thermal slowdown (hardware); 5 min 00 s (50%) "
        "power-limited, normal at full load."
    )


def test_a_counter_that_fell_counts_from_the_new_load_of_the_driver() -> None:
    (time,) = throttle_times({"gpu/throttle_brake": 100.0}, {"gpu/throttle_brake": 0.5})
    assert time.seconds == 0.5


def test_nothing_lowered_and_nothing_known_are_two_things() -> None:
    assert throttle_text(throttle_times(NOTHING, NOTHING), 60.0) == "Not throttled in 1 min 00 s."
    assert "does not report" in throttle_text(throttle_times(NOTHING, {}), 60.0)
    assert "does not report" in throttle_text(throttle_times({}, NOTHING), 60.0)


def test_a_share_is_at_most_all_of_the_window() -> None:
    times = throttle_times({"gpu/throttle_brake": 0.0}, {"gpu/throttle_brake": 2.04})
    assert throttle_text(times, 2.0) == "In 2 s: 2.0 s (100%) power brake."
    assert throttle_text(times, 0.0) == "In 0 s: 2.0 s power brake."


def test_the_counters_themselves_tell_of_the_time_since_the_driver_was_loaded() -> None:
    counters = dict.fromkeys(REASONS, 0.0)
    assert throttle_total(counters) == "Not throttled since the driver was loaded."
    assert throttle_total(counters | {"gpu/throttle_brake": 3.25}) == (
        "Since the driver was loaded: 3.2 s power brake."
    )
    assert "does not report" in throttle_total({})
