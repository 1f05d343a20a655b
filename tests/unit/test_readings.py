"""When the allocator's counters are read, and by which thread: nobody may wait for a read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.memory import allocator
from stepscope.session.sampler import REPEATED_S, BoundarySampler
from tests.support.fake_nvml import FakeClock

TICK_S = 0.1


class Bench:
    """Ticks of a sampler and boundaries of a training, in the order of a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int | None = 0) -> None:
        self.clock = FakeClock()
        self.cost_s = 0.0
        self.reads: list[float] = []
        monkeypatch.setattr(allocator, "read", self.read)
        monkeypatch.setattr(allocator, "counts_by_device", dict)
        self.readings = BoundarySampler(index, clock=self.clock)
        self._tick_at = self.clock.now
        self.taken: list[dict[str, float]] = []
        self.by_sampler = 0

    def read(self, index: int) -> dict[str, float]:
        self.reads.append(self.clock.now)
        self.clock.now += self.cost_s
        return {"memory/allocated": float(len(self.reads))}

    def step(self, seconds: float) -> None:
        """Let the ticks of this time come, then a boundary."""
        self.wait(seconds)
        if self.readings.wanted:
            self.readings.serve()

    def wait(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self._tick_at <= end:
            self.clock.now = max(self.clock.now, self._tick_at)
            before = len(self.reads)
            self.taken.append(self.readings.take())
            self.by_sampler += len(self.reads) - before
            self._tick_at += TICK_S
        self.clock.now = max(self.clock.now, end)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.step(seconds)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.mark.parametrize("step_s", [0.001, 0.0999, 0.12, 2.0])
def test_the_training_thread_reads_once_a_tick_at_most(bench: Bench, step_s: float) -> None:
    bench.steps(round(10 / step_s), step_s)
    assert bench.by_sampler == 0
    assert min(90, 10 / step_s) <= len(bench.reads) <= 101
    assert all(bench.taken), "a gap in the curve"


def test_in_a_long_step_it_reads_between_phases(bench: Bench) -> None:
    for _ in range(10):
        for _ in range(20):
            bench.wait(0.2)
            bench.readings.read_if_requested()
            bench.readings.read_if_requested()  # nobody has asked again
        bench.step(0.01)
    values = [taken["memory/allocated"] for taken in bench.taken]
    assert len(set(values)) >= 200
    assert len(bench.reads) <= 1 + 10 * 21
    assert bench.by_sampler == 0


def test_a_phase_without_a_reading_ends_the_curve(bench: Bench) -> None:
    """As in a driver that is stuck: the sampler goes on, and nothing waits."""
    bench.steps(10, 0.1)
    before = len(bench.taken)
    bench.wait(2 * REPEATED_S)
    known = [bool(taken) for taken in bench.taken[before:]]
    assert known == sorted(known, reverse=True)
    assert sum(known) == pytest.approx(REPEATED_S / TICK_S, abs=1)
    assert bench.by_sampler == 0
    bench.step(0.0)
    bench.wait(0.1)
    assert bench.taken[-1]


def test_after_a_command_it_reads_at_once(bench: Bench) -> None:
    bench.steps(5, 1.0)
    with bench.readings.then_read():
        bench.wait(3.0)
        reads = len(bench.reads)
    bench.wait(0.1)
    assert bench.taken[-1] == {"memory/allocated": float(reads + 1)}
    assert bench.by_sampler == 0


def test_a_boundary_that_fails_to_read_is_told_in_the_sampler(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int) -> dict[str, float]:
        raise RuntimeError("Invalid device argument")

    bench.step(0.01)
    monkeypatch.setattr(allocator, "read", fail)
    bench.readings.serve()
    with pytest.raises(RuntimeError, match="Invalid device"):
        bench.readings.take()


def test_without_a_device_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, None)
    bench.steps(3, 1.0)
    assert (bench.reads, any(bench.taken), bench.readings.wanted) == ([], False, False)
    bench.readings.begin(1)
    bench.steps(3, 1.0)
    assert bench.taken[-1]


def cuda(stats: Callable[[int], dict[str, Any]]) -> SimpleNamespace:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 2,
            memory_stats_as_nested_dict=stats,
        )
    )


def test_failed_allocations_count_from_the_runs_start(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [{"num_ooms": 5, "num_alloc_retries": 7}, {"num_ooms": 1, "num_alloc_retries": 2}]
    monkeypatch.setitem(sys.modules, "torch", cuda(lambda index: dict(counts[index])))
    readings = BoundarySampler()
    readings.begin(1)  # known later, as in a script
    counts[1] = {"num_ooms": 2, "num_alloc_retries": 4}
    assert readings.read() == {"memory/ooms": 1.0, "memory/alloc_retries": 2.0}


def test_counters_that_the_script_sets_back_count_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch.cuda.reset_accumulated_memory_stats()."""
    stats = {"num_ooms": 5, "num_alloc_retries": 7}
    monkeypatch.setitem(sys.modules, "torch", cuda(lambda _: stats))
    readings = BoundarySampler(0)
    stats |= {"num_ooms": 0}
    readings.read()
    stats |= {"num_ooms": 6, "num_alloc_retries": 8}
    assert readings.read() == {"memory/ooms": 6.0, "memory/alloc_retries": 1.0}
