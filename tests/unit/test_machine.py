"""A machine as it is looked at once a second: tiers, gaps, lost GPUs, MIG, Xid events."""

from __future__ import annotations

import json

import pytest

from stepscope.gpu.machine_monitor import MAX_XIDS, NOT_WATCHED, MachineMonitor
from stepscope.gpu.machine_state import (
    DeviceState,
    HealthStatus,
    MachineState,
    machine_json,
)
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import NullSource
from stepscope.gpu.xid import xid_event
from tests.support.fake_machine import (
    BUSY,
    GIB,
    FakeSource,
    divided,
    gpus,
    info,
    machine,
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


def test_the_json_has_every_gpu_and_below_it_its_instances() -> None:
    gpu = divided(1)
    gpu.processes, gpu.missing = None, {"processes": "permission"}
    found = json.loads(json.dumps(machine_json(machine(FakeSource([*gpus(1), gpu])).poll())))
    first, second = found["devices"]
    assert (first["uuid"], first["index"], first["mig"]) == (info().uuid, 0, False)
    assert (first["values"], first["health"]["level"]) == (BUSY, "ok")
    assert first["processes"][0]["pid"] == 4000
    assert (first["facts"]["temp_slowdown"], first["lost"]) == (92.0, None)
    assert (second["mig"], second["processes"]) == (True, None)
    assert second["missing"] == {"processes": "permission", "xid": NOT_WATCHED}
    assert [one["processes"][0]["user"] for one in second["instances"]] == ["bob", "bob"]
    assert second["instances"][0]["name"].endswith("MIG 1g.10gb")


def test_a_new_source_replaces_the_one_before() -> None:
    clock = FakeClock()
    sources = [NullSource("The NVIDIA driver is not loaded."), FakeSource(gpus(1))]
    found = MachineMonitor(lambda: sources[0], clock=clock, wall_clock=clock.wall)
    view = looks(found, clock, 2)
    assert (view.reason, view.devices, view.host.driver) == (sources[0].reason, (), None)
    del sources[0]
    assert only(looks(found, clock, 1)).values == BUSY, "all tiers"


def test_an_xid_is_kept_with_its_age_and_severity() -> None:
    clock = FakeClock()
    found = machine(FakeSource(gpus(2)), clock)
    looks(found, clock, 1)
    for _ in range(MAX_XIDS + 5):
        found.note_xid(xid_event(info(1).uuid, 79))
    first, second = looks(found, clock, 1, seconds=4).devices
    assert first.xids == ()
    assert len(second.xids) == MAX_XIDS
    assert second.xids[0].age_s == pytest.approx(4.0)
    assert second.health.level is HealthStatus.CRITICAL
