"""Which series of memory readings are growth, and the growth events of a live run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.memory.growth import (
    MIN_SAMPLES,
    GrowthMonitor,
    GrowthTrend,
    find_trend,
    is_material,
)
from stepscope.store.blocks import Floats
from tests.support.fake_nvml import FakeClock

MIB = 2.0**20
N = 128
LONG_S = 3600.0

Shape = Callable[[Floats, np.random.Generator], Floats]


def series(shape: Shape, n: int = N, seed: int = 0) -> tuple[Floats, Floats]:
    """Readings at steps 0, 10, 20 …: `shape` makes MiB of them, of 0 to 1."""
    steps = 10.0 * np.arange(n)
    values = shape(np.linspace(0, 1, n), np.random.default_rng(seed))
    return steps, MIB * (500 + values)


def noise(rng: np.random.Generator, n: int, deviation: float = 1.0) -> Floats:
    return rng.normal(0, deviation, n)


GROWS: dict[str, Shape] = {
    "a leak in noise": lambda x, rng: 100 * x + noise(rng, len(x)),
    "a leak under the teeth of a collector": lambda x, rng: 200 * x + 10 * (32 * x % 1),
    "a leak that gets faster": lambda x, rng: 60 * x + 60 * x**2,
    "a leak with one large tensor for a moment": lambda x, rng: (
        100 * x + 400 * (abs(x - 0.4) < 0.01)
    ),
}
DOES_NOT: dict[str, Shape] = {
    "noise": lambda x, rng: noise(rng, len(x), 10),
    "a step": lambda x, rng: 200.0 * (x > 0.5) + noise(rng, len(x)),
    "a step on a gentle rise": lambda x, rng: 20 * x + 200.0 * (x > 0.5),
    "teeth": lambda x, rng: 200 * (6 * x % 1),
    "epochs whose workers are started again": lambda x, rng: 100 * np.sqrt(4 * x % 1),
    "a cache that fills": lambda x, rng: 200 * (1 - np.exp(-5 * x)),
    "a vocabulary": lambda x, rng: 60 * np.log(1 + 100 * x),
    "a leak that has ended": lambda x, rng: 100 * np.minimum(x, 0.7),
    "a leak that begins": lambda x, rng: 400 * np.maximum(0, x - 0.8),
}


@pytest.mark.parametrize("name", GROWS)
def test_it_grows(name: str) -> None:
    steps, values = series(GROWS[name])
    trend = find_trend(steps, values)
    assert trend is not None
    assert is_material(trend, "allocated", LONG_S)
    true = (values[-1] - values[0]) / steps[-1]
    assert trend.bytes_per_step == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("name", DOES_NOT)
def test_it_does_not_grow(name: str) -> None:
    assert all(find_trend(*series(DOES_NOT[name], seed=seed)) is None for seed in range(5))


def test_few_readings_or_the_same_step_say_nothing() -> None:
    steps, values = series(lambda x, rng: 100 * x)
    assert find_trend(steps[: MIN_SAMPLES - 1], values[: MIN_SAMPLES - 1]) is None
    assert find_trend(steps[:MIN_SAMPLES], values[:MIN_SAMPLES]) is not None
    assert find_trend(0 * steps, values) is None


def some_steps(rng: np.random.Generator, n: int) -> Floats:
    """Memory that is taken for good six times or so, as by ever larger batches."""
    return np.cumsum((rng.random(n) < 6 / n) * rng.exponential(30, n)) + noise(rng, n, 3)


def red(rng: np.random.Generator, n: int) -> Floats:
    """Noise of which each value is 0.9 of the one before and something new."""
    out, value = np.empty(n), 0.0
    for i, new in enumerate(rng.normal(0, 1, n)):
        out[i] = value = 0.9 * value + new
    return out


FALSE_ALARMS: dict[str, tuple[Any, int]] = {
    "white noise": (noise, 0),
    "red noise": (red, 1),
    "a random walk": (lambda rng, n: np.cumsum(rng.normal(0, 1, n)), 4),
    "steps": (some_steps, 20),
}
"""Of 2000 series of each kind, how many may be taken for growth: a walk does grow, by chance."""


@pytest.mark.parametrize("kind", FALSE_ALARMS)
def test_false_alarms_are_rare(kind: str) -> None:
    make, most = FALSE_ALARMS[kind]
    steps = np.arange(MIN_SAMPLES) * 10.0
    rng = np.random.default_rng(1)
    made = (MIB * (500 + make(rng, MIN_SAMPLES)) for _ in range(2000))
    alarms = sum(find_trend(steps, values) is not None for values in made)
    assert alarms <= most


@settings(max_examples=60, deadline=None)
@given(
    st.integers(MIN_SAMPLES, N),
    st.floats(1e3, 1e9),
    st.floats(0, 1e12),
    st.integers(0, 2**32 - 1),
)
def test_any_even_leak_is_seen(n: int, rate: float, level: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.integers(3, 7, n)).astype(float)
    trend = find_trend(steps, level + rate * steps)
    assert trend is not None
    assert trend.bytes_per_step == pytest.approx(rate, rel=1e-2)


def trend_of(rate: float, level: float = 1000 * MIB) -> GrowthTrend:
    return GrowthTrend(100, 500, level - 400 * rate, level)


@pytest.mark.parametrize(
    ("rate", "level", "kind", "seconds", "options", "material"),
    [
        (0.05, 1000, "allocated", 600, {}, True),
        (0.05, 9000, "allocated", 600, {}, False),
        (0.05, 1000, "allocated", 20, {}, False),
        (0.30, 1000, "allocated", 20, {}, True),
        (0.03, 1000, "process", 600, {}, False),
        (0.06, 1000, "process", 600, {}, True),
        (0.40, 1000, "process", 600, {"filling": True}, False),
        (0.60, 1000, "process", 600, {"filling": True}, True),
    ],
)
def test_material_growth(
    rate: float, level: float, kind: str, seconds: float, options: dict[str, bool], material: bool
) -> None:
    """Over 400 steps: rate and level in MiB."""
    trend = trend_of(rate * MIB, level=level * MIB)
    assert is_material(trend, kind, seconds, **options) is material


# --- events of a live run ---

TICK_S = 0.1

Level = Callable[[int], float]


class Bench:
    """Ticks and steps of a training, whose memory is a function of the step."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.events: list[dict[str, Any]] = []
        self.recorder: Any = SimpleNamespace(step=0, epoch=0, event=self.event)
        self.monitor = GrowthMonitor(self.recorder, clock=self.clock)

    def event(self, kind: str, text: str, **data: Any) -> None:
        self.events.append({"kind": kind, "text": text} | data)

    def run(
        self,
        steps: Iterable[int],
        step_s: float = 0.05,
        *,
        rss: Level = lambda step: 300 * MIB,
        **levels: Level,
    ) -> None:
        """Take a step each `step_s`; a tick comes each 0.1 s."""
        keys = {
            "allocated": "memory/allocated",
            "children": "process/children_rss",
        }
        named = {"process/rss": rss} | {keys[name]: level for name, level in levels.items()}
        for step in steps:
            self.recorder.step = step
            ticks, before = int((self.clock.now + step_s) / TICK_S), int(self.clock.now / TICK_S)
            for _ in range(ticks - before):
                self.monitor.observe({key: level(step) for key, level in named.items()})
            self.clock.now += step_s


@pytest.fixture
def bench() -> Bench:
    return Bench()


def leak(rate: float, level: float = 200 * MIB) -> Level:
    return lambda step: level + rate * step


def test_a_leak_is_one_event_within_a_minute(bench: Bench) -> None:
    bench.run(range(1, 1200), allocated=leak(0.1 * MIB))
    [event] = bench.events
    assert (event["kind"], event["where"]) == ("memory_growth", "allocated")
    assert event["text"].startswith(
        "Allocated memory grows by 10.00 MiB per 100 steps (336 steps) and is now "
    )
    assert event["next"] in event["text"]
    assert event["bytes_per_step"] == pytest.approx(0.1 * MIB)


def test_it_is_another_event_when_the_memory_has_doubled(bench: Bench) -> None:
    bench.run(range(1, 12_000), allocated=leak(0.2 * MIB, level=1000 * MIB))
    first, second = [event["level"] for event in bench.events]
    assert second >= 2 * first


def test_a_slow_leak_is_detected_in_the_long_run(bench: Bench) -> None:
    """1 MiB a minute, in noise of the size of five minutes' growth."""

    def level(step: int) -> float:
        return 400 * MIB + 5 * MIB * ((step * 7919) % 101) / 101 + step * MIB / 60

    bench.run(range(1, 3600), step_s=1.0, allocated=level)
    [event] = bench.events
    assert event["bytes_per_step"] == pytest.approx(MIB / 60, rel=0.2)


@pytest.mark.parametrize(
    ("levels", "where"),
    [
        ({"rss": leak(0.2 * MIB, 1000 * MIB)}, "process"),
        ({"children": leak(0.3 * MIB, 1000 * MIB)}, "workers"),
    ],
)
def test_on_a_cpu_the_process_and_its_workers_count(
    bench: Bench, levels: dict[str, Level], where: str
) -> None:
    bench.run(range(1, 2500), **levels)
    [event] = bench.events
    assert event["where"] == where
    assert ("; the workers have" in event["text"]) is (where == "workers")


def test_in_the_first_epoch_a_data_set_may_fill_its_cache(bench: Bench) -> None:
    fill = leak(0.06 * MIB, 300 * MIB)
    bench.recorder.epoch = 1
    bench.run(range(1, 1000), rss=fill)
    bench.recorder.epoch = 2  # what follows is evaluated without that growth
    bench.run(range(1000, 2000), rss=fill)
    assert bench.events == []


@pytest.mark.parametrize(
    ("level", "steps", "grown"),
    [
        (leak(10 * MIB), 60, 500 * MIB),
        (leak(10 * MIB), 20, 160 * MIB),
        (lambda step: (200 + 4 * step + 400 * (step * 7919 % 101 < 30)) * MIB, 300, 980 * MIB),
        (lambda step: (200 + 300 * (step % 2)) * MIB, 100, None),
        (lambda step: (200 + 3 * step + 20 * (step * 7919 % 101)) * MIB, 100, None),
        (leak(MIB), 6, None),
    ],
)
def test_growth_of_the_newest_samples(
    bench: Bench, level: Level, steps: int, grown: float | None
) -> None:
    """Before there is an event, as of a script that fails at once. 0.1 s a step."""
    bench.run(range(1, steps + 1), step_s=0.1001, allocated=level)
    found = bench.monitor.allocated_growth()
    assert (found is None) is (grown is None)
    assert found is None or found.grown == pytest.approx(grown, rel=0.1)


def test_growth_since_an_event_counts_until_it_ends(bench: Bench) -> None:
    rise = leak(0.1 * MIB)
    bench.run(range(1, 1900), allocated=rise)
    found = bench.monitor.allocated_growth()
    assert found is not None
    assert found.bytes_per_step == pytest.approx(0.1 * MIB, rel=0.05)
    assert found.grown > 150 * MIB, "also before the newest samples, and after the event"
    bench.run(range(1900, 2900), allocated=lambda step: 200 * MIB)
    assert bench.monitor.allocated_growth() is None


# --- no growth ------------------------------------------------------------------------------------


def test_warm_up_pauses_and_validation_are_no_growth(bench: Bench) -> None:
    bench.run(range(1, 20), allocated=leak(50 * MIB))
    for epoch in range(20):
        steps = range(20 + 100 * epoch, 120 + 100 * epoch)
        bench.run(steps, allocated=lambda step: 1200 * MIB)
        bench.run([steps[-1]] * 50, allocated=lambda step: 1800 * MIB)  # validation
        bench.clock.now += 60.0 * (epoch == 7)  # a pause
    assert bench.events == []


def tooth(period: int, height: float) -> Level:
    return lambda step: 500 * MIB + height * (step % period) / period


@pytest.mark.parametrize("period", [200, 1700])
def test_collected_garbage_is_no_growth(bench: Bench, period: int) -> None:
    """Teeth of 100 MiB, in 10 s to 85 s: the collector runs at the end of each."""
    bench.run(range(1, 20_000), rss=tooth(period, 100 * MIB))
    assert bench.events == []


def test_a_level_that_was_reached_before_is_no_growth(bench: Bench) -> None:
    """Each epoch of ten minutes grows as the first one did, in which a cache may fill."""
    for epoch in (1, 2, 3):
        bench.recorder.epoch = epoch
        bench.run(range(12_000 * epoch - 11_999, 12_000 * epoch), rss=tooth(12_000, 100 * MIB))
    assert bench.events == []
