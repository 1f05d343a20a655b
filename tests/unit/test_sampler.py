"""One tick at a time, by an injected clock: what is recorded, when, and what a failure costs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from stepscope.common.metrics import BY_KEY
from stepscope.gpu.device_events import BACK_S, CALM_S, DeviceEventDetector
from stepscope.gpu.device_info import DeviceInfo
from stepscope.gpu.machine_state import XidEvent
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import NullSource
from stepscope.gpu.xid import NO_INSTANCE, xid_event
from stepscope.memory import allocator
from stepscope.session import sampler
from stepscope.session.sampler import Sampler, next_deadline
from stepscope.store.recorder import Recorder
from tests.support.fake_machine import info, process
from tests.support.fake_nvml import FakeClock

A, B = "GPU-aaaa", "GPU-bbbb"


class FakeRecorder:
    """Keeps what it is told; the five methods that the sampler calls."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self.devices: list[tuple[str, dict[str, float]]] = []
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.run_json: list[dict[str, Any]] = []
        self.boundaries_wanted = 0

    def sample(self, values: Mapping[str, float]) -> None:
        self.samples.append(dict(values))

    def device(self, uuid: str, values: Mapping[str, float]) -> None:
        self.devices.append((uuid, dict(values)))

    def event(self, kind: str, text: str, **data: Any) -> None:
        self.events.append((kind, text, data))

    def describe(self, **run_info: Any) -> None:
        self.run_json.append(run_info)

    def request_boundary(self) -> None:
        self.boundaries_wanted += 1

    def capabilities(self) -> list[dict[str, Any]]:
        return [found["capabilities"] for found in self.run_json if "capabilities" in found]

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


class FakeSource(NullSource):
    """Two GPUs whose readings, losses and slowness a test sets."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__("")
        self.reason = None
        self.clock = clock
        self.gone: set[str] = set()
        self.cost_s = 0.0
        self.error: Exception | None = None
        self.missing: dict[str, str] = {}
        self.listed: tuple[GpuProcess, ...] | None = ()
        self.recovery: str | None = None
        self.asked: list[tuple[str, tuple[SamplingTier, ...]]] = []

    def devices(self) -> list[DeviceInfo]:
        return [replace(info(i, "Test"), uuid=uuid) for i, uuid in enumerate((A, B))]

    def read(self, uuid: str, *tiers: SamplingTier) -> dict[str, float]:
        self.asked.append((uuid, tiers))
        self.clock.now += self.cost_s
        if uuid == A and self.error is not None:
            raise self.error
        if uuid in self.gone:
            return {}
        values = {"fast": "gpu/util", "medium": "gpu/temp", "slow": "gpu/power_limit"}
        return {values[tier]: 50.0 for tier in tiers if tier in values}

    def reasons(self, uuid: str) -> dict[str, str]:
        return self.missing

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        return self.listed

    def recovery_action(self, uuid: str) -> str | None:
        return self.recovery

    def lost(self, uuid: str) -> str | None:
        return "lost: test" if uuid in self.gone else None


class Bench:
    """A sampler with all its parts at hand."""

    def __init__(self, **arguments: Any) -> None:
        self.clock = FakeClock()
        self.recorder = FakeRecorder()
        self.source = FakeSource(self.clock)
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


def test_a_tick_records_one_sample_and_each_gpu() -> None:
    bench = Bench()
    bench.source.cost_s = 0.002
    bench.ticks(2)
    first, second = bench.recorder.samples
    assert [uuid for uuid, _ in bench.recorder.devices] == [A, B, A, B]
    assert {"process/rss", "process/peak_rss", "host/mem_used"} <= first.keys()
    assert first.keys() | second.keys() <= set(BY_KEY)
    assert "sampler/cost" not in first
    assert second["sampler/cost"] == pytest.approx(0.004), "of the tick before"


@pytest.mark.parametrize("beat_s", [0.0999, 0.1, 0.1001])
def test_slow_values_are_left_out_of_the_ticks_between(beat_s: float) -> None:
    bench = Bench(gpu_uuids=[A])
    bench.ticks(21, beat_s)
    assert {uuid for uuid, _ in bench.source.asked} == {A}
    rows = [values for _, values in bench.recorder.devices]
    assert [i for i, row in enumerate(rows) if "gpu/temp" in row] == [0, 5, 10, 15, 20]
    assert [i for i, row in enumerate(rows) if "gpu/power_limit" in row] == [0, 10, 20]
    assert all("gpu/util" in row for row in rows)
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
    reasons = [found["allocator"] for found in later.recorder.capabilities()]
    assert reasons == ["the run has used no CUDA device", None]


def test_without_gpus_only_the_process_is_sampled() -> None:
    bench = Bench(source=NullSource("No driver."), host=False)
    bench.ticks(21)
    assert bench.recorder.devices == bench.recorder.events == []
    assert bench.recorder.capabilities()[0]["nvml"] == "No driver."
    keys = {key for row in bench.recorder.samples for key in row}
    assert "process/rss" in keys
    assert not {key for key in keys if key.startswith("host/")}, "left to another process"


def test_a_failing_gpu_costs_its_own_values_and_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.source.error = RuntimeError("odd")
    with caplog.at_level(logging.WARNING):
        bench.ticks(11)
    assert {uuid for uuid, _ in bench.recorder.devices} == {B}
    assert len(bench.recorder.samples) == 11
    assert len(caplog.records) == 1


def test_capabilities_are_recorded_once_and_again_when_they_change() -> None:
    bench = Bench()
    bench.ticks(30)
    assert bench.recorder.capabilities() == [
        {
            "nvml": None,
            "allocator": "the run has used no CUDA device",
            "parts": "no optimizer of torch was seen",
            "missing": {A: {}, B: {}},
        }
    ]
    bench.source.missing = {"gpu/energy": "permission"}
    bench.sampler.train_on(B)
    bench.ticks(30)
    _, changed = bench.recorder.capabilities()
    assert changed["missing"][A] == {"gpu/energy": "permission"}
    unlisted = {"memory/process_used", "gpu/mem_others"}
    assert set(changed["missing"][B]) == {"gpu/energy"} | unlisted
    bench.source.listed = None
    bench.source.missing = {"processes": "permission"}
    before = len(bench.recorder.devices)
    bench.ticks(11)
    assert bench.recorder.capabilities()[-1]["missing"][A]["gpu/mem_others"] == "permission"
    hidden = bench.recorder.devices[before:]
    assert not any("gpu/mem_others" in values for _, values in hidden)


def test_a_lost_gpu_is_one_event_and_its_return_another() -> None:
    bench = Bench()
    bench.ticks(2)
    for _ in range(10):  # found every 5 s, and lost again by the question that it does not answer
        bench.source.gone = {A}
        bench.ticks(50)
        bench.source.gone = set()
        bench.ticks(5)
    assert bench.recorder.kinds() == ["gpu_lost"]
    bench.ticks(round(BACK_S / 0.1) + 2)
    assert bench.recorder.events == [
        ("gpu_lost", "GPU 0 (Test): lost: test", {"uuid": A}),
        ("gpu_recovered", "GPU 0 (Test): answers again", {"uuid": A}),
    ]


def test_throttling_has_a_start_and_an_end() -> None:
    for idle_cap_or_setting in (0x0, 0x1, 0x2, 0x4, 0x10, 0x100):
        assert throttle([float(idle_cap_or_setting)] * 100) == []
    events = throttle([0.0] * 5 + [float(0x44)] * 11 + [0.0] * 40)
    words = ["hardware thermal slowdown"]
    assert events == [
        ("throttle_start", {"words": words}),
        ("throttle_end", {"words": words, "duration_s": pytest.approx(1.0)}),
    ]
    flickering = throttle([float(0x20), 0.0, float(0x80), 0.0] * 20 + [0.0] * 40)
    assert [kind for kind, _ in flickering] == ["throttle_start", "throttle_end"]
    assert flickering[1][1]["words"] == ["software thermal slowdown", "power brake"]
    unknown: list[float | None] = [None] * int(10 * CALM_S)
    assert throttle([float(0x8), *unknown]) == [
        ("throttle_start", {"words": ["hardware slowdown"]})
    ]


def test_errors_of_memory_from_before_the_run_are_not_the_runs() -> None:
    device = DeviceEventDetector("GPU 0")
    assert device.health({"gpu/ecc_uncorrected": 5.0, "gpu/remapped_rows": 1.0}, None) == []
    assert device.health({}, None) == []
    found = device.health({"gpu/ecc_uncorrected": 7.0, "gpu/remapped_rows": 1.0}, None)
    text = "GPU 0: 2 new memory errors that ECC could not correct"
    assert found == [("ecc", text, {"count": 2.0})]
    assert device.health({"gpu/ecc_uncorrected": 0.0}, None) == [], "the driver was loaded again"


def test_a_new_recovery_action_is_an_event_at_the_rare_readings() -> None:
    device, reset = DeviceEventDetector("GPU 0"), "the GPU has to be reset"
    actions = (None, reset, reset, "other")
    kinds = [[kind for kind, _, _ in device.health({}, action)] for action in actions]
    assert kinds == [[], ["gpu_recovery_action"], [], ["gpu_recovery_action"]]
    bench = Bench(gpu_uuids=[A])
    bench.source.recovery = reset
    bench.ticks(201)
    rare = [i for i, (_, tiers) in enumerate(bench.source.asked) if SamplingTier.RARE in tiers]
    assert len(rare) == 3, "every ten seconds"
    assert bench.recorder.kinds() == ["gpu_recovery_action"]


def test_memory_on_the_training_gpu_comes_with_the_processs_values() -> None:
    bench = Bench(gpu_uuids=[A], allocator_index=0)
    bench.source.listed = (process(os.getpid(), memory=700), process(1, memory=300))
    bench.ticks(21)
    held = [i for i, row in enumerate(bench.recorder.samples) if "memory/process_used" in row]
    assert held == [1, 11], "in the row after the look"
    assert bench.recorder.samples[1]["memory/process_used"] == 700.0
    rows = [values for _, values in bench.recorder.devices]
    assert [row["gpu/mem_others"] for row in rows if "gpu/mem_others" in row] == [300.0] * 3
    described = bench.recorder.run_json
    (lists,) = [found["gpu_processes"] for found in described if "gpu_processes" in found]
    assert [one["pid"] for one in lists[A]] == [os.getpid(), 1]


def test_missed_ticks_are_skipped_and_ticks_do_not_drift() -> None:
    # At 0.15 a tick and a half late: one missed. At 0.96 stalled for most of a second: no burst.
    for now, expected in {0.0: 0.1, 0.02: 0.1, 0.15: 0.2, 0.96: 1.0, -0.01: 0.1}.items():
        assert next_deadline(0.0, 0.1, now) == pytest.approx(expected)
    deadline = 0.0
    for _ in range(100):
        deadline = next_deadline(deadline, 0.1, deadline + 0.03)
    assert deadline == pytest.approx(10.0)


class FakeWatch:
    """Tells one error of each GPU at once, without a thread."""

    def __init__(
        self, source: FakeSource, on_event: Callable[[XidEvent], None], *, uuids: frozenset[str]
    ) -> None:
        on_event(xid_event(A, 13, 3))
        on_event(xid_event("GPU-unknown", 13, NO_INSTANCE))

    def stop(self, timeout_s: float) -> bool:
        return True


def test_errors_are_told_with_the_gpus_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "XidWatcher", FakeWatch)
    for uuids in (None, ["MIG-1"]):
        bench = Bench(gpu_uuids=uuids)
        bench.sampler._begin_watching()
        bench.ticks(1)
        told = [text for kind, text, _ in bench.recorder.events if kind == "xid"]
        assert [text.partition(":")[0] for text in told] == ["GPU 0 (Test)", "GPU"]
