"""A machine as it is looked at once a second: tiers, ages, gaps, lost GPUs, MIG, energy, memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from stepscope.gpu.machine_monitor import (
    KEPT_READINGS,
    MAX_XIDS,
    NOT_WATCHED,
    DeviceHistory,
    MachineMonitor,
)
from stepscope.gpu.machine_state import (
    DeviceState,
    HealthStatus,
    MachineState,
    machine_json,
)
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import NullSource
from stepscope.gpu.xid import NO_INSTANCE, xid_event
from tests.support.fake_machine import (
    BUSY,
    GIB,
    FakeSource,
    divided,
    facts,
    gpus,
    info,
    machine,
    process,
)
from tests.support.fake_nvml import FakeClock


def looks(
    found: MachineMonitor, clock: FakeClock, count: int, seconds: float = 1.0
) -> MachineState:
    """Look so many times, with a pause before each."""
    for _ in range(count):
        clock.now += seconds
        view = found.poll()
    return view


def only(view: MachineState) -> DeviceState:
    (device,) = view.devices
    return device


@pytest.mark.parametrize("count", [1, 16])
def test_every_gpu_is_seen_with_its_values_facts_and_processes(count: int) -> None:
    view = machine(FakeSource(gpus(count))).poll()
    assert json.loads(json.dumps(machine_json(view)))["devices"][0]["values"] == BUSY
    assert [device.info.nvml_index for device in view.devices] == list(range(count))
    first = view.devices[0]
    assert first.values == BUSY
    assert first.facts == facts(info())
    assert first.processes == (process(4000),)
    assert (view.reason, view.host.driver, view.host.cuda) == (None, "580.95.05", "13.0")
    assert view.host.memory_total > view.host.memory_used > 0


def test_fast_values_are_read_at_each_look_and_rare_ones_seldom() -> None:
    source, clock = FakeSource(gpus(1)), FakeClock()
    found = machine(source, clock)
    device = only(looks(found, clock, 4))
    assert device.values.keys() >= {"gpu/util", "gpu/remapped_rows"}
    looks(found, clock, 7)
    counts = [[asked for _, asked in source.reads].count(tier) for tier in SamplingTier]
    assert counts == [11, 11, 11, 2]


def test_a_value_that_is_not_answered_any_more_is_missing_with_its_reason() -> None:
    (gpu,) = gpus(1)
    clock = FakeClock()
    found = machine(FakeSource([gpu]), clock)
    assert "gpu/power" in only(looks(found, clock, 1)).values
    gpu.missing = {"gpu/power": "error: Timeout"}
    device = only(looks(found, clock, 1))
    assert "gpu/power" not in device.values
    assert device.missing == {"gpu/power": "error: Timeout", "xid": NOT_WATCHED}
    assert device.values["gpu/util"] == 97.0
    source = FakeSource([gpu])
    source.reasons = lambda uuid: {"gpu/util": "no data"}  # type: ignore[method-assign]
    assert only(machine(source).poll()).missing == {"xid": NOT_WATCHED}, "the value is there"


def test_a_lost_gpu_has_no_values_and_the_others_go_on() -> None:
    first, second = gpus(2)
    clock = FakeClock()
    found = machine(FakeSource([first, second]), clock)
    looks(found, clock, 1)
    second.lost = "lost: GPU is lost"
    one, other = looks(found, clock, 1).devices
    assert one.health.level is HealthStatus.OK
    assert (other.health.level, other.lost) == (HealthStatus.CRITICAL, "lost: GPU is lost")
    assert other.values == {}
    second.lost = None
    assert looks(found, clock, 1).devices[1].values == BUSY


def test_mig_instances_stand_under_their_parent_with_their_own_memory() -> None:
    gpu = divided()
    clock = FakeClock()
    found = machine(FakeSource([gpu]), clock)
    device = only(looks(found, clock, 1))
    assert device.missing["gpu/util"] == "not supported on this GPU"
    small = device.instances[0]
    assert small.values == {"gpu/mem_used": 3.0 * GIB, "gpu/mem_total": 10.0 * GIB}
    gpu.instances.pop()
    assert len(only(looks(found, clock, 5)).instances) == 2, "looked for again every 10 s"
    assert len(only(looks(found, clock, 6)).instances) == 1


def test_a_link_that_speeds_up_with_the_load_is_no_issue() -> None:
    (gpu,) = gpus(1)
    clock = FakeClock()
    found = machine(FakeSource([gpu]), clock)
    assert gpu.facts is not None
    fast, idle = gpu.facts, replace(gpu.facts, pcie_gen=1)
    for begun in range(12):
        gpu.facts, gpu.values["gpu/util"] = idle, 0.0
        looks(found, clock, 1 + begun)
        gpu.facts, gpu.values["gpu/util"] = fast, 98.0
        for _ in range(20):
            assert only(looks(found, clock, 1)).health.text == "Working."
    gpu.facts = idle
    assert only(looks(found, clock, 10)).health.text.startswith("PCIe link at gen")


def test_the_driver_is_looked_for_again_when_it_says_so() -> None:
    clock = FakeClock()
    answers = [NullSource("The NVIDIA driver is not loaded.", 1130.0), FakeSource(gpus(1))]
    found = MachineMonitor(lambda: answers.pop(0), clock=clock, wall_clock=clock.wall)
    clock.now += 100
    view = found.poll()
    assert (view.reason, view.devices) == ("The NVIDIA driver is not loaded.", ())
    assert (view.host.driver, view.since) == (None, clock.wall())
    assert looks(found, clock, 1).devices == ()
    view = looks(found, clock, 1, seconds=50)
    assert (len(view.devices), view.since) == (1, clock.wall()), "sums begin with the GPUs"
    assert looks(found, clock, 3).since == clock.wall() - 3


def test_an_xid_is_kept_with_its_age_and_severity() -> None:
    clock = FakeClock()
    found = machine(FakeSource(gpus(2)), clock)
    looks(found, clock, 1)
    for _ in range(MAX_XIDS + 5):
        found.note_xid(xid_event(info(1).uuid, 79, NO_INSTANCE))
    first, second = looks(found, clock, 1, seconds=4).devices
    assert first.xids == ()
    assert len(second.xids) == MAX_XIDS
    assert second.xids[0].age_s == pytest.approx(4.0)
    assert second.health.level is HealthStatus.CRITICAL


def test_energy_and_throttled_time_begin_at_the_first_poll() -> None:
    (gpu,) = gpus(1)
    clock = FakeClock()
    found = machine(FakeSource([gpu]), clock)
    gpu.values |= {"gpu/energy": 1000.0, "gpu/throttle_power": 5.0}
    assert only(looks(found, clock, 1)).energy == 0.0
    gpu.values |= {"gpu/energy": 1500.0, "gpu/throttle_power": 9.0}
    device = only(looks(found, clock, 10))
    assert (device.energy, device.seconds) == (500.0, 10.0)
    assert device.throttled["gpu/throttle_power"] == 4.0
    gpu.values |= {"gpu/energy": 7.0}  # the driver was loaded again
    assert only(looks(found, clock, 1)).energy is None


def test_the_history_is_bounded_in_readings_and_in_time() -> None:
    history = DeviceHistory()
    for second in range(3 * KEPT_READINGS):
        history.add(float(second), {"gpu/util": 1.0})
    assert len(history.readings()) == KEPT_READINGS
    history.add(10_000.0, {"gpu/util": 2.0})
    assert [reading.ts for reading in history.readings()] == [10_000.0]
