"""State of a machine at one time (GPUs, host, energy), immutable and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from stepscope.gpu.device_events import throttle_text, throttle_times
from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.processes import GpuProcess


class HealthStatus(StrEnum):
    """Severity of an issue: CRITICAL endangers results, WARNING costs speed or memory."""

    OK = "ok"
    NOTICE = "notice"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Higher is more severe."""
        return list(HealthStatus).index(self)


@dataclass(frozen=True, slots=True)
class HealthIssue:
    """One problem or remark, with its severity."""

    level: HealthStatus
    text: str


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Status line and severity of a GPU, and all issues, the most severe first."""

    level: HealthStatus
    text: str
    issues: tuple[HealthIssue, ...] = ()


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One Xid event, the driver's error message, of a GPU at `ts` (epoch seconds).

    `gpu_instance` is the id of a MIG instance, None for a whole GPU.
    """

    uuid: str
    code: int
    text: str
    level: HealthStatus
    gpu_instance: int | None
    ts: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of one GPU or MIG instance; metrics by key, in stored units.

    `missing` has the reasons for missing metrics, also "processes" and "xid". `first` has each
    metric's value of the first poll, `seconds` before. `is_link_slow`: at the latest reading of the
    properties.
    """

    info: DeviceInfo
    facts: DeviceProperties | None
    values: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None  # A text of the driver, as is `recovery`.
    recovery: str | None = None
    xids: tuple[XidEvent, ...] = ()
    is_link_slow: bool = False
    health: DeviceHealth = DeviceHealth(HealthStatus.OK, "")
    instances: tuple[DeviceState, ...] = ()

    @property
    def throttled(self) -> dict[str, float]:
        """The seconds of each throttle reason since the first poll."""
        return throttle_times(self.first, self.values)

    @property
    def energy(self) -> float | None:
        """The joules since the first poll; None without a counter, or after its reset."""
        now, first = self.values.get("gpu/energy"), self.first.get("gpu/energy")
        return None if now is None or first is None or now < first else now - first

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
            "window_s": device.seconds,
            "text": throttle_text(device.throttled, device.seconds),
            "seconds": dict(device.throttled),
        },
        "energy": device.energy,
        "xids": [asdict(xid) for xid in device.xids],
        "processes": None if processes is None else [asdict(process) for process in processes],
        "instances": [device_json(instance) for instance in device.instances],
    }
