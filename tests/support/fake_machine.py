"""GPUs without a driver: a source whose answers a test sets.

Fair because a `MachineMonitor` only calls the methods of `DeviceSource`; what the real source
makes of a driver's answers is tested in test_nvml.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import XidEvent
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import DeviceSource
from stepscope.gpu.xid import xid_event
from tests.support.fake_nvml import FakeClock

GIB = 2**30

TIERS: dict[SamplingTier, dict[str, float]] = {
    SamplingTier.FAST: {
        "gpu/util": 97.0,
        "gpu/mem_util": 40.0,
        "gpu/mem_used": 40.0 * GIB,
        "gpu/mem_reserved": 0.5 * GIB,
        "gpu/power": 553.0,
        "gpu/sm_clock": 1755.0,
        "gpu/throttle_reasons": 0.0,
        "gpu/throttle_power": 10.0,
        "gpu/throttle_sw_thermal": 0.0,
        "gpu/throttle_hw_thermal": 0.0,
        "gpu/throttle_brake": 0.0,
        "gpu/pcie_tx": 1.5 * GIB,
        "gpu/pcie_rx": 0.25 * GIB,
        "gpu/nvlink_tx": 0.0,
        "gpu/nvlink_rx": 0.0,
    },
    SamplingTier.MEDIUM: {
        "gpu/temp": 61.0,
        "gpu/temp_mem": 68.0,
        "gpu/temp_margin": 31.0,
        "gpu/mem_clock": 2619.0,
        "gpu/energy": 1000.0,
        "gpu/sm_active": 71.0,
        "gpu/sm_occupancy": 22.0,
        "gpu/tensor_active": 33.0,
        "gpu/dram_active": 45.0,
    },
    SamplingTier.SLOW: {"gpu/power_limit": 700.0, "gpu/mem_total": 80.0 * GIB},
    SamplingTier.RARE: {
        "gpu/ecc_corrected": 0.0,
        "gpu/ecc_uncorrected": 0.0,
        "gpu/remapped_rows": 0.0,
        "gpu/remap_pending": 0.0,
        "gpu/remap_failed": 0.0,
        "gpu/pcie_replays": 0.0,
    },
}
BUSY = {key: value for values in TIERS.values() for key, value in values.items()}
"""Readings of a GPU at work that has no trouble."""

IDLE = BUSY | {"gpu/util": 0.0, "gpu/power": 72.0, "gpu/sm_clock": 345.0, "gpu/temp": 34.0}


def info(index: int = 0, name: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> DeviceInfo:
    """A whole GPU; its UUID's first part differs from those of the others."""
    gpu = DeviceInfo(
        uuid=f"GPU-{index:08x}-0000-4000-8000-000000000000",
        name=name,
        nvml_index=index,
        memory_total=80 * GIB,
        driver_version="580.95.05",
        mig=False,
    )
    return replace(gpu, **changes)


def facts(of: DeviceInfo, **changes: Any) -> DeviceProperties:
    """What the driver tells of an H100 beside its readings."""
    known = DeviceProperties(
        uuid=of.uuid,
        name=of.name,
        nvml_index=of.nvml_index,
        pci_bus_id=f"00000000:{0x17 + of.nvml_index:02X}:00.0",
        memory_total=of.memory_total,
        driver_version=of.driver_version,
        cuda_version="13.0",
        power_limit_default=700.0,
        temp_slowdown=92.0,
        pcie_gen=5,
        pcie_width=16,
        pcie_max_gen=5,
        pcie_max_width=16,
        mig=of.mig,
        parent_uuid=None,
    )
    return replace(known, **changes)


def process(pid: int = 4242, **changes: Any) -> GpuProcess:
    """A training of this user."""
    running = GpuProcess(
        pid=pid,
        name="python",
        command="python train.py --epochs 3",
        user="ada",
        memory=38 * GIB,
        kind="compute",
        yours=True,
        state="running",
    )
    return replace(running, **changes)


@dataclass
class Gpu:
    """One GPU's answers; `missing` has the reasons for what is taken out of `values`."""

    info: DeviceInfo = field(default_factory=info)
    values: dict[str, float] = field(default_factory=lambda: dict(BUSY))
    missing: dict[str, str] = field(default_factory=dict)
    facts: DeviceProperties | None = None
    processes: tuple[GpuProcess, ...] | None = ()
    lost: str | None = None
    instances: list[Gpu] = field(default_factory=list)


@dataclass
class FakeSource(DeviceSource):
    """A `DeviceSource`; `reads` counts the tiers that were asked for."""

    gpus: list[Gpu] = field(default_factory=list)
    reason: str | None = None
    reads: list[tuple[str, SamplingTier]] = field(default_factory=list)
    before_read: Callable[[], None] = lambda: None

    def devices(self) -> list[DeviceInfo]:
        return [gpu.info for gpu in self.gpus]

    def read(self, uuid: str, *tiers: SamplingTier) -> dict[str, float]:
        self.before_read()
        self.reads += [(uuid, tier) for tier in tiers]
        gpu = self._gpu(uuid)
        if gpu.lost is not None:
            return {}
        keys = {key for tier in tiers for key in TIERS[tier]} - gpu.missing.keys()
        return {key: value for key, value in gpu.values.items() if key in keys}

    def reasons(self, uuid: str) -> dict[str, str]:
        gpu = self._gpu(uuid)
        return dict(gpu.missing) if gpu.lost is None else dict.fromkeys(BUSY, gpu.lost)

    def lost(self, uuid: str) -> str | None:
        return self._gpu(uuid).lost

    def facts(self, uuid: str) -> DeviceProperties | None:
        return self._gpu(uuid).facts

    def instances(self, uuid: str) -> list[DeviceInfo]:
        return [gpu.info for gpu in self._gpu(uuid).instances]

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        return self._gpu(uuid).processes

    def _gpu(self, uuid: str) -> Gpu:
        every = [*self.gpus, *(one for gpu in self.gpus for one in gpu.instances)]
        return next((gpu for gpu in every if gpu.info.uuid == uuid), Gpu(lost="not found"))


def gpus(count: int) -> list[Gpu]:
    """So many GPUs, each with its facts and a process; every third one is idle."""
    found = []
    for index in range(count):
        one = info(index)
        values = IDLE if index % 3 == 2 else BUSY
        found.append(Gpu(one, dict(values), facts=facts(one), processes=(process(4000 + index),)))
    return found


def divided(index: int = 0) -> Gpu:
    """A GPU that is divided into two MIG instances, as ordinary users see it."""
    parent = info(index, mig=True)
    why = dict.fromkeys(("gpu/util", "gpu/mem_util"), "not supported on this GPU")
    values = {key: value for key, value in BUSY.items() if key not in why}
    return Gpu(
        parent,
        values,
        why,
        facts(parent),
        instances=[instance(parent, 1, "1g.10gb"), instance(parent, 2, "3g.40gb")],
    )


def instance(parent: DeviceInfo, number: int, profile: str) -> Gpu:
    """One MIG instance, with a process of another user."""
    one = replace(
        parent,
        uuid=f"MIG-{number:08x}-0000-4000-8000-000000000000",
        name=f"{parent.name} MIG {profile}",
        memory_total=10 * number * GIB,
        mig=False,
    )
    sizes = {"gpu/mem_used": 3.0 * GIB, "gpu/mem_total": 10.0 * number * GIB}
    known = facts(one, parent_uuid=parent.uuid)
    why = {"gpu/util": "not supported on this GPU"}
    who = process(5000 + number, user="bob", yours=False, memory=3 * GIB)
    return Gpu(one, sizes, why, known, (who,))


def machine(source: Any, clock: FakeClock | None = None) -> MachineMonitor:
    """A machine that sees these GPUs."""
    clock = clock or FakeClock()
    return MachineMonitor(lambda: source, clock=clock, wall_clock=clock.wall)


def without(values: Mapping[str, float], *keys: str) -> dict[str, float]:
    """Readings that lack some metrics."""
    return {key: value for key, value in values.items() if key not in keys}


class FakeErrors:
    """Reports one Xid at once; fair because the real watch calls `on_event` in the same way."""

    begun: list[FakeErrors]

    def __init__(self, source: DeviceSource, on_event: Callable[[XidEvent], None]) -> None:
        self.stopped = False
        FakeErrors.begun.append(self)
        on_event(xid_event(info().uuid, 79))

    def reason(self, uuid: str) -> str | None:
        return None

    def stop(self, timeout_s: float = 2.0) -> bool:
        self.stopped = True
        return True
