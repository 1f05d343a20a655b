"""Growth in a run that goes on: when it is told, of what, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.memory.growth_detector import GROUPS, GrowthMonitor, MemorySample, MinimumWindow
from stepscope.run import read_run
from tests.support.fake_nvml import FakeClock
from tests.support.recorded_runs import Row, write_run

MIB = 2.0**20
TICK_S = 0.1

Level = Callable[[int], float]


@dataclass
class Notes:
    """The recorder of a run, as far as the watch needs it."""

    step: int = 0
    epoch: int = 0
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def event(self, kind: str, text: str, /, **data: Any) -> None:
        self.events.append((kind, text, data))

    def told(self, *wheres: str) -> list[dict[str, Any]]:
        return [data for _, _, data in self.events if data["where"] in wheres]


class Bench:
    """Ticks and steps of a training, whose memory is a function of the step."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.notes = Notes()
        self.collections = 0
        self.watch = GrowthMonitor(
            self.notes, clock=self.clock, collections=lambda: self.collections
        )

    def run(
        self,
        steps: Iterable[int],
        step_s: float = 0.05,
        *,
        allocated: Level | None = None,
        peak: Level | None = None,
        rss: Level = lambda step: 300 * MIB,
        children: Level | None = None,
    ) -> None:
        """Take a step each `step_s`; a tick comes each 0.1 s."""
        for step in steps:
            self.notes.step = step
            ticks, before = int((self.clock.now + step_s) / TICK_S), int(self.clock.now / TICK_S)
            for _ in range(ticks - before):
                values = {"process/rss": rss(step)}
                if allocated is not None:
                    values["memory/allocated"] = allocated(step)
                if peak is not None:
                    values["memory/peak_allocated"] = peak(step)
                if children is not None:
                    values["process/children_rss"] = children(step)
                self.watch.observe(values)
            self.clock.now += step_s


@pytest.fixture
def bench() -> Bench:
    return Bench()


def leak(rate: float, level: float = 200 * MIB) -> Level:
    return lambda step: level + rate * step


def test_a_leak_is_told_once_within_a_minute(bench: Bench) -> None:
    bench.run(range(1, 1200), allocated=leak(0.1 * MIB))
    [(kind, text, data)] = bench.notes.events
    assert kind == "memory_growth"
    assert text.startswith("Allocated memory grows by 10.0 MiB per 100 steps (95% CI ")
    assert data["next"] in text
    assert data["bytes_per_step"] == pytest.approx(0.1 * MIB)
    assert data["low"] <= data["bytes_per_step"] <= data["high"]
    assert set(data) >= {"where", "steps", "low", "high", "bytes_per_step"}


def test_it_is_told_again_when_it_gets_faster_or_the_memory_has_doubled(bench: Bench) -> None:
    bench.run(range(1, 3000), allocated=leak(0.02 * MIB, level=1000 * MIB))
    assert len(bench.notes.events) == 1
    bench.run(range(3000, 6000), allocated=lambda step: 1060 * MIB + (step - 3000) * 0.2 * MIB)
    first, second = bench.notes.told("allocated")
    assert second["bytes_per_step"] == pytest.approx(10 * first["bytes_per_step"], rel=0.01)
    bench.run(range(6000, 12000), allocated=lambda step: 1660 * MIB + (step - 6000) * 0.2 * MIB)
    levels = [data["level"] for data in bench.notes.told("allocated")]
    assert len(levels) == 3
    assert levels[2] >= 2 * levels[1]


def test_a_leak_that_begins_late_is_told(bench: Bench) -> None:
    bench.run(range(1, 40_000), step_s=0.05, allocated=lambda step: 500 * MIB)
    assert bench.notes.events == []
    bench.run(range(40_000, 42_000), allocated=lambda step: 500 * MIB + 0.1 * MIB * (step - 40_000))
    assert bench.notes.told("allocated")


def test_a_slow_leak_is_told_in_the_long_run(bench: Bench) -> None:
    """1 MiB a minute, in noise of the order of what comes in ten."""

    def level(step: int) -> float:
        return 400 * MIB + 5 * MIB * ((step * 7919) % 101) / 101 + step * MIB / 60

    bench.run(range(1, 3 * 3600), step_s=1.0, allocated=level)
    [told] = bench.notes.told("allocated")
    assert told["bytes_per_step"] == pytest.approx(MIB / 60, rel=0.2)


def test_warm_up_pauses_and_validation_are_no_growth(bench: Bench) -> None:
    bench.run(range(1, 20), allocated=leak(50 * MIB))
    for epoch in range(20):
        steps = range(20 + 100 * epoch, 120 + 100 * epoch)
        bench.run(steps, allocated=lambda step: 1200 * MIB)
        bench.run([steps[-1]] * 50, allocated=lambda step: 1800 * MIB)  # validation
        bench.clock.now += 60.0 * (epoch == 7)  # a pause
    assert bench.notes.events == []


def test_a_step_within_long_steps_is_no_growth(bench: Bench) -> None:
    """Ticks inside a step see activations come and go."""
    bench.run(
        range(1, 400), step_s=1.03, allocated=lambda step: 500 * MIB + 300 * MIB * (step % 7) / 7
    )
    assert bench.notes.events == []


def test_batches_that_get_longer_are_no_leak(bench: Bench) -> None:
    """The last batch stays until the next one: in an epoch sorted by length the floor rises."""
    length = leak(0.4 * MIB, 100 * MIB)
    bench.run(
        range(1, 3000),
        allocated=lambda step: 1000 * MIB + length(step),
        peak=lambda step: 1000 * MIB + 5 * length(step),
    )
    assert bench.notes.events == []


def test_readings_inside_longer_batches_tell_that_as_well(bench: Bench) -> None:
    ticks = iter(range(100_000))

    def level(step: int) -> float:
        return 1000 * MIB + (100 * MIB + 0.4 * MIB * step) * (1 + 4 * (next(ticks) % 2))

    bench.run(range(1, 3000), step_s=0.2, allocated=level)
    assert bench.notes.events == []


@pytest.mark.parametrize("jump", [0, 400])
def test_a_leak_below_steady_peaks_is_told(bench: Bench, jump: float) -> None:
    """What a step takes for a time lies on top of what is kept; one step takes far more."""
    kept = leak(0.4 * MIB, 1000 * MIB)
    bench.run(
        range(1, 3000),
        allocated=kept,
        peak=lambda step: kept(step) + 500 * MIB + jump * MIB * (step > 400),
    )
    told = bench.notes.told("allocated")
    assert told
    assert "sorted by length" in told[0]["next"]


def test_on_a_cpu_the_process_and_its_workers_count(bench: Bench) -> None:
    bench.run(range(1, 2500), rss=leak(0.2 * MIB, 1000 * MIB))
    [told] = bench.notes.events
    assert told[2]["where"] == "process"
    assert told[1].startswith("The process's memory grows by 20.0 MiB per 100 steps")


def test_growing_workers_are_named(bench: Bench) -> None:
    bench.run(range(1, 2500), children=leak(0.3 * MIB, 1000 * MIB))
    [told] = bench.notes.events
    assert told[2]["where"] == "workers"
    assert 1000 * MIB < told[2]["workers"] < told[2]["level"]
    assert "reference counts" in told[2]["next"]


def test_in_the_first_epoch_a_data_set_may_fill_its_cache(bench: Bench) -> None:
    bench.notes.epoch = 1
    bench.run(range(1, 1000), rss=leak(0.06 * MIB, 300 * MIB))
    assert bench.notes.events == []
    bench.notes.epoch = 2
    bench.run(range(1000, 3000), rss=lambda step: 360 * MIB)
    assert bench.notes.events == []


def test_in_the_first_epoch_a_large_growth_is_told_all_the_same(bench: Bench) -> None:
    bench.notes.epoch = 1
    bench.run(range(1, 1000), rss=leak(0.5 * MIB, 300 * MIB))
    assert bench.notes.told("process")


def test_the_runs_of_the_collector_are_told(bench: Bench) -> None:
    bench.run(range(1, 1200), allocated=leak(0.1 * MIB))
    assert bench.notes.events[0][2]["collections"] == 0
    assert "reference cycles" in bench.notes.events[0][1]


def test_before_the_first_step_nothing_is_judged(bench: Bench) -> None:
    for value in range(2000):
        bench.clock.now += TICK_S
        bench.watch.observe({"memory/allocated": value * MIB})
    assert bench.notes.events == []


def test_without_values_nothing_is_judged(bench: Bench) -> None:
    bench.notes.step = 5
    bench.watch.observe({})
    assert bench.notes.events == []


def test_what_is_kept_is_bounded() -> None:
    scale = MinimumWindow(1.0)
    for step in range(10_000):
        scale.add(MemorySample(float(step), step, 1.0))
    assert len(scale.groups) == GROUPS


def tooth(period: int, height: float) -> Level:
    return lambda step: 500 * MIB + height * (step % period) / period


@pytest.mark.parametrize("period", [200, 1000, 1700])
def test_garbage_that_is_collected_is_no_growth(bench: Bench, period: int) -> None:
    """Teeth of 100 MiB, in 10 s to 85 s: the collector runs at the end of each."""

    def rss(step: int) -> float:
        bench.collections = step // period
        return tooth(period, 100 * MIB)(step)

    bench.run(range(1, 20_000), rss=rss)
    assert bench.notes.events == []


def test_what_was_as_high_before_is_no_growth(bench: Bench) -> None:
    """Each epoch of ten minutes, told as growth in the first one at most."""
    bench.run(range(1, 40_000), rss=tooth(12_000, 400 * MIB))
    assert len(bench.notes.events) == 1
    assert bench.notes.events[0][2]["last_step"] < 12_000


def test_a_leak_below_earlier_heights_is_told_once_it_is_above_them(bench: Bench) -> None:
    bench.run(range(1, 2000), allocated=lambda step: 800 * MIB)
    bench.run(range(2000, 5000), allocated=lambda step: 1500 * MIB)
    bench.run(range(5000, 16_000), allocated=lambda step: 800 * MIB + (step - 5000) * 0.1 * MIB)
    [told] = bench.notes.told("allocated")
    assert told["level"] > 1500 * MIB


# --- in a recorded run ----------------------------------------------------------------------------


def rows(level: Level, key: str, count: int = 4000) -> list[Row]:
    return [(0.1 * i, i // 2, {key: level(i // 2)}) for i in range(count)]


def found_in(folder: Path) -> list[Any]:
    return [
        finding
        for finding in findings(read_recorded(read_run(folder)))
        if finding.kind == "memory-growth"
    ]


@pytest.mark.parametrize("key", ["memory/allocated", "process/rss"])
def test_a_recorded_leak_is_found(tmp_path: Path, key: str) -> None:
    folder = write_run(tmp_path / "r", samples=rows(leak(0.3 * MIB), key))
    [finding] = found_in(folder)
    assert "grows by 30.0 MiB per 100 steps" in finding.text
    assert finding.next
    assert (finding.rank, finding.phase, finding.setting) == (0, None, None)


def test_a_recorded_run_without_a_leak_has_no_finding(tmp_path: Path) -> None:
    flat = rows(lambda step: 500 * MIB + MIB * ((step * 7919) % 101) / 101, "memory/allocated")
    assert found_in(write_run(tmp_path / "r", samples=flat)) == []


@pytest.mark.parametrize(("times", "count"), [(5, 0), (1, 1)])
def test_a_recorded_rise_with_the_batches_is_no_finding(
    tmp_path: Path, times: int, count: int
) -> None:
    length = leak(0.3 * MIB, 500 * MIB)
    floors = rows(length, "memory/allocated")
    peaks = rows(lambda step: 2000 * MIB + times * length(step), "memory/peak_allocated")
    both = [(*floor[:-1], floor[-1] | peak[-1]) for floor, peak in zip(floors, peaks, strict=True)]
    assert len(found_in(write_run(tmp_path / "r", samples=both))) == count


def test_a_recorded_rise_to_less_than_there_was_is_no_finding(tmp_path: Path) -> None:
    def level(step: int) -> float:
        return 900 * MIB if step < 1400 else 500 * MIB + (step - 1400) * 0.6 * MIB

    assert found_in(write_run(tmp_path / "r", samples=rows(level, "memory/allocated"))) == []

    def higher(step: int) -> float:
        return level(step) + 600 * MIB * (step >= 1400)

    assert found_in(write_run(tmp_path / "s", samples=rows(higher, "memory/allocated")))


def test_a_data_set_that_fills_is_no_finding(tmp_path: Path) -> None:
    filling = rows(leak(0.03 * MIB, 400 * MIB), "process/rss")
    assert found_in(write_run(tmp_path / "r", {"epoch": 1}, samples=filling)) == []
    assert found_in(write_run(tmp_path / "s", {"epoch": 2}, samples=filling))


def test_recorded_growth_that_has_ended_is_no_finding(tmp_path: Path) -> None:
    def cache(step: int) -> float:
        return 2000 * MIB + min(step, 300) * MIB

    assert (
        found_in(write_run(tmp_path / "r", {"epoch": 2}, samples=rows(cache, "process/rss"))) == []
    )
