"""State of a machine at one time (GPUs, host, energy), immutable and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.gpu.device_events import throttle_text
from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.health import DeviceHealth, XidEvent
from stepscope.gpu.processes import GpuProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of one GPU or MIG instance; metrics by key, in stored units.

    `missing` has the reasons for missing metrics, also "processes" and "xid". The seconds in
    `throttled` and the joules of `energy` begin at the first poll, `throttle_window_s` before.
    """

    info: DeviceInfo
    facts: DeviceProperties | None
    values: Mapping[str, float]
    missing: Mapping[str, str]
    health: DeviceHealth
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)
    throttle_window_s: float = 0.0
    energy: float | None = None
    xids: tuple[XidEvent, ...] = ()
    instances: tuple[DeviceState, ...] = ()

    @property
    def own_processes(self) -> tuple[GpuProcess, ...] | None:
        """The processes except those on its MIG instances, which have separate lists."""
        if self.processes is None:
            return None
        placed = {process.pid for one in self.instances for process in one.processes or ()}
        return tuple(process for process in self.processes if process.pid not in placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """State of the host: bytes, and percent of all cores; None for unknown values."""

    name: str
    cpu: str
    cores: int | None
    platform: str
    python: str
    torch: str | None
    driver: str | None
    cuda: str | None
    cpu_percent: float | None
    memory_used: float
    memory_total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """State at `ts` (epoch seconds), with sums from `since`; `reason` explains missing GPUs."""

    ts: float
    since: float
    reason: str | None
    devices: tuple[DeviceState, ...]
    host: HostState


Json = dict[str, Any]


def machine_json(view: MachineState) -> Json:
    """Convert the state of a machine to JSON."""
    return {
        "ts": view.ts,
        "since": view.since,
        "reason": view.reason,
        "devices": [device_json(device) for device in view.devices],
        "host": asdict(view.host),
    }


def device_json(device: DeviceState) -> Json:
    """Convert the state of a GPU to JSON, with its MIG instances in the same form."""
    processes = device.processes
    return {
        "uuid": device.info.uuid,
        "name": device.info.name,
        "index": device.info.nvml_index,
        "mig": device.info.mig,
        "facts": None if device.facts is None else asdict(device.facts),
        "values": dict(device.values),
        "missing": dict(device.missing),
        "lost": device.lost,
        "health": asdict(device.health),
        "throttled": {
            "window_s": device.throttle_window_s,
            "text": throttle_text(device.throttled, device.throttle_window_s),
            "seconds": dict(device.throttled),
        },
        "energy": device.energy,
        "xids": [asdict(xid) for xid in device.xids],
        "processes": None if processes is None else [asdict(process) for process in processes],
        "instances": [device_json(instance) for instance in device.instances],
    }
