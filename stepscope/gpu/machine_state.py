"""What is seen of a machine at one moment; frozen, so that any thread may show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepscope.gpu.device_info import DeviceFacts, DeviceInfo
from stepscope.gpu.energy import Energy
from stepscope.gpu.health import Health, Xid
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.throttle_time import ThrottleTime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One GPU, or a MIG instance of one; metrics by key, in stored units.

    `ages` has how old each value is in seconds, `missing` why a metric has none. `processes` is
    None where the driver hides them, and `missing["processes"]` says why; `missing["xid"]` does so
    for `xids`. `throttled` and `energy`
    are those since the looking began, `throttle_window_s` at most ten minutes ago.
    """

    info: DeviceInfo
    facts: DeviceFacts | None
    values: Mapping[str, float]
    ages: Mapping[str, float]
    missing: Mapping[str, str]
    health: Health
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    throttled: tuple[ThrottleTime, ...] = ()
    throttle_window_s: float = 0.0
    energy: Energy | None = None
    xids: tuple[Xid, ...] = ()
    instances: tuple[DeviceView, ...] = ()

    @property
    def own_processes(self) -> tuple[GpuProcess, ...] | None:
        """The processes but for those on its MIG instances, which have lists of their own."""
        if self.processes is None:
            return None
        placed = {process.pid for one in self.instances for process in one.processes or ()}
        return tuple(process for process in self.processes if process.pid not in placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The machine around the GPUs; bytes, and percent of all cores. None: not known here."""

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
class MachineView:
    """All of it at `ts` (epoch seconds), added up from `since`; `reason`: why there is no GPU."""

    ts: float
    since: float
    reason: str | None
    devices: tuple[DeviceView, ...]
    host: HostView
