"""State of a machine at one time (GPUs and host), immutable and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

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
    """One Xid event, the driver's error message, of a GPU at `ts` (epoch seconds)."""

    uuid: str
    code: int
    text: str
    level: HealthStatus
    ts: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of one GPU or MIG instance; metrics by key, in stored units.

    `missing` has the reasons for missing metrics, also "processes" and "xid".
    """

    info: DeviceInfo
    facts: DeviceProperties | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None  # A text of the driver.
    xids: tuple[XidEvent, ...] = ()
    health: DeviceHealth = DeviceHealth(HealthStatus.OK, "")
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
    """State at `ts` (epoch seconds); `reason` explains missing GPUs."""

    ts: float
    reason: str | None
    devices: tuple[DeviceState, ...]
    host: HostState


Json = dict[str, Any]


def machine_json(view: MachineState) -> Json:
    """Convert the state of a machine to JSON."""
    devices = [_device_json(device) for device in view.devices]
    return {"ts": view.ts, "reason": view.reason, "devices": devices, "host": asdict(view.host)}


def _device_json(device: DeviceState) -> Json:
    """Convert the state of a GPU to JSON, with its MIG instances in the same form."""
    content: Json = msgspec.to_builtins(device)
    info = content.pop("info")
    return {
        "uuid": info["uuid"],
        "name": info["name"],
        "index": info["nvml_index"],
        "mig": info["mig"],
        **content,
        "instances": [_device_json(instance) for instance in device.instances],
    }
