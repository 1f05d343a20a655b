"""One tick at a time, by an injected clock: what is recorded, when, and what a failure costs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, cast

import pytest

from stepscope.common.metrics import BY_KEY
from stepscope.gpu.health import BACK_S, CALM_S, DeviceEventDetector
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import NullSource
from stepscope.gpu.xid import xid_event
from stepscope.memory import allocator
from stepscope.session.sampler import Sampler, next_deadline
from stepscope.store.recorder import Recorder
from tests.support.fake_machine import BUSY, FakeSource, Gpu, info, process, without
from tests.support.fake_nvml import FakeClock
from tests.support.fake_recorder import FakeRecorder

A, B = "GPU-aaaa", "GPU-bbbb"


class Bench:
    """A sampler with all its parts at hand."""

    def __init__(self, **arguments: Any) -> None:
        self.clock = FakeClock()
        self.recorder = FakeRecorder()
        values = without(BUSY, "gpu/mem_used")  # the processes say all
        self.gpus = [Gpu(info(uuid=uuid), dict(values)) for uuid in (A, B)]
        self.source = FakeSource(self.gpus)
        self.sampler = Sampler(
            cast(Recorder, self.recorder),
            **({"allocator_index": None, "source": self.source, "clock": self.clock} | arguments),
        )

    def ticks(self, count: int, beat_s: float = 0.1) -> None:
        for _ in range(count):
            self.sampler.tick()
            self.clock.now += beat_s


def throttle(
    masks: Sequence[float | None], step_s: float = 0.1
) -> list[tuple[str, dict[str, Any]]]:
    watch = DeviceEventDetector("GPU 0")
    found = [watch.events(i * step_s, mask, None) for i, mask in enumerate(masks)]
    return [(kind, data) for events in found for kind, _, data in events]


@pytest.mark.parametrize("beat_s", [0.0999, 0.1001])
def test_slow_values_are_left_out_of_the_ticks_between(beat_s: float) -> None:
    bench = Bench(gpu_uuids=[A])
    bench.ticks(21, beat_s)
    assert set().union(*bench.recorder.samples) <= set(BY_KEY)
    assert {uuid for uuid, _ in bench.source.reads} == {A}
    rows = [values for _, values in bench.recorder.devices]
    assert [i for i, row in enumerate(rows) if "gpu/temp" in row] == [0, 5, 10, 15, 20]
    assert [i for i, row in enumerate(rows) if "gpu/power_limit" in row] == [0, 10, 20]
    assert all("gpu/util" in row for row in rows)
    assert bench.source.reads.count((A, SamplingTier.RARE)) == 1
    hosts = [i for i, row in enumerate(bench.recorder.samples) if "host/mem_used" in row]
    assert hosts == [0, 10, 20]


def test_the_allocator_is_read_by_its_cuda_index_also_if_known_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "read", lambda index: {"memory/allocated": float(index)})
    bench = Bench(allocator_index=3)
    bench.ticks(1)
    assert bench.recorder.boundaries_wanted == 1
    bench.sampler.readings.serve()  # as the training thread does, at its next step
    bench.ticks(1)
    assert bench.recorder.samples[1]["memory/allocated"] == 3.0
    later = Bench()
    monkeypatch.setattr(allocator, "reason", lambda: None)
    later.ticks(1)
    later.sampler.readings.begin(1)
    later.ticks(20)
    assert "memory/allocated" not in later.recorder.samples[0]
    assert later.recorder.samples[-1]["memory/allocated"] == 1.0
    reasons = [found["allocator"] for found in later.recorder.described("capabilities")]
    assert reasons == ["the run has used no CUDA device", None]


def test_without_gpus_only_the_process_is_sampled() -> None:
    bench = Bench(source=NullSource("No driver."), host=False)
    bench.ticks(21)
    assert bench.recorder.devices == bench.recorder.events == []
    assert bench.recorder.described("capabilities")[0]["nvml"] == "No driver."
    keys = set().union(*bench.recorder.samples)
    assert "process/rss" in keys
    assert "host/mem_used" not in keys, "left to another process"


def test_a_failing_gpu_costs_its_own_values_and_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.gpus[0].values = cast(Any, None)  # raises
    with caplog.at_level(logging.WARNING):
        bench.ticks(11)
    assert {uuid for uuid, _ in bench.recorder.devices} == {B}
    assert len(bench.recorder.samples) == 11
    assert len(caplog.records) == 1


def test_capabilities_are_recorded_once_and_again_when_they_change() -> None:
    bench = Bench()
    bench.ticks(30)
    (found,) = bench.recorder.described("capabilities")
    assert (found["nvml"], found["missing"]) == (None, {A: {}, B: {}})
    for gpu in bench.gpus:
        gpu.missing = {"gpu/energy": "permission"}
    bench.sampler.train_on(B)
    bench.ticks(30)
    _, changed = bench.recorder.described("capabilities")
    assert changed["missing"][A] == {"gpu/energy": "permission"}
    unlisted = {"memory/process_used", "gpu/mem_others"}
    assert set(changed["missing"][B]) == {"gpu/energy"} | unlisted
    for gpu in bench.gpus:
        gpu.processes, gpu.missing = None, {"processes": "permission"}
    before = len(bench.recorder.devices)
    bench.ticks(11)
    assert (
        bench.recorder.described("capabilities")[-1]["missing"][A]["gpu/mem_others"] == "permission"
    )
    assert not any("gpu/mem_others" in values for _, values in bench.recorder.devices[before:])


def test_a_lost_gpu_is_one_event_and_its_return_another() -> None:
    bench = Bench()
    bench.ticks(2)
    for _ in range(10):  # found every 5 s, and lost again by the question that it does not answer
        bench.gpus[0].lost = "lost: test"
        bench.ticks(50)
        bench.gpus[0].lost = None
        bench.ticks(5)
    assert [kind for kind, *_ in bench.recorder.events] == ["gpu_lost"]
    bench.ticks(round(BACK_S / 0.1) + 2)
    assert [kind for kind, *_ in bench.recorder.events] == ["gpu_lost", "gpu_recovered"]
    assert {data["uuid"] for _, _, data in bench.recorder.events} == {A}


def test_throttling_has_a_start_and_an_end() -> None:
    assert throttle([float(0x1 | 0x2 | 0x4 | 0x10 | 0x100)] * 100) == []
    events = throttle([0.0] * 5 + [float(0x44)] * 11 + [0.0] * 40)
    assert [kind for kind, _ in events] == ["throttle_start", "throttle_end"]
    words = ["hardware thermal slowdown"]
    assert events[1][1] == {"words": words, "duration_s": pytest.approx(1.0)}
    flickering = throttle([float(0x20), 0.0, float(0x80), 0.0] * 20 + [0.0] * 40)
    assert [kind for kind, _ in flickering] == ["throttle_start", "throttle_end"]
    assert flickering[1][1]["words"] == ["software thermal slowdown", "power brake"]
    unknown: list[float | None] = [None] * int(10 * CALM_S)
    assert [kind for kind, _ in throttle([float(0x8), *unknown])] == ["throttle_start"]


def test_errors_of_memory_from_before_the_run_are_not_the_runs() -> None:
    device = DeviceEventDetector("GPU 0")
    assert device.memory_errors({"gpu/ecc_uncorrected": 5.0, "gpu/remapped_rows": 1.0}) == []
    assert device.memory_errors({}) == []
    found = device.memory_errors({"gpu/ecc_uncorrected": 7.0, "gpu/remapped_rows": 1.0})
    assert [(kind, data) for kind, _, data in found] == [("ecc", {"count": 2.0})]
    assert device.memory_errors({"gpu/ecc_uncorrected": 0.0}) == [], "the driver was loaded again"


def test_memory_on_the_training_gpu_comes_with_the_processs_values() -> None:
    bench = Bench(gpu_uuids=[A], allocator_index=0)
    bench.gpus[0].processes = (process(os.getpid(), memory=700), process(1, memory=300))
    bench.ticks(21)
    held = [i for i, row in enumerate(bench.recorder.samples) if "memory/process_used" in row]
    assert held == [1, 11], "in the row after the look"
    assert bench.recorder.samples[1]["memory/process_used"] == 700.0
    rows = [values for _, values in bench.recorder.devices]
    assert [row["gpu/mem_others"] for row in rows if "gpu/mem_others" in row] == [300.0] * 3
    (lists,) = bench.recorder.described("gpu_processes")
    assert [one["pid"] for one in lists[A]] == [os.getpid(), 1]


def test_missed_ticks_are_skipped_and_ticks_do_not_drift() -> None:
    # At 0.15 a tick and a half late: one missed. At 0.96 stalled for most of a second: no burst.
    for now, expected in {0.0: 0.1, 0.02: 0.1, 0.15: 0.2, 0.96: 1.0, -0.01: 0.1}.items():
        assert next_deadline(0.0, 0.1, now) == pytest.approx(expected)
    deadline = 0.0
    for _ in range(100):
        deadline = next_deadline(deadline, 0.1, deadline + 0.03)
    assert deadline == pytest.approx(10.0)


def test_errors_are_recorded_with_the_gpus_name() -> None:
    bench = Bench()
    bench.ticks(1)
    for uuid in (A, "GPU-unknown"):
        bench.sampler._on_xid(xid_event(uuid, 13))
    bench.ticks(1)
    assert [kind for kind, *_ in bench.recorder.events] == ["xid", "xid"]
    names = [text.partition(":")[0] for _, text, _ in bench.recorder.events]
    assert names == ["GPU 0 (NVIDIA H100 80GB HBM3)", "GPU"]
