"""State of a machine at one time (GPUs, host, energy), immutable and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stepscope.gpu.device_events import throttle_text
from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.health import DeviceHealth, XidEvent
from stepscope.gpu.processes import GpuProcess

MAX_GAP_S = 3.0  # Maximum interval between two samples of the power that is integrated linearly.


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Joules within `seconds`, by the driver's counter or as an integral of the power samples."""

    joules: float
    seconds: float
    from_counter: bool


class EnergyMeter:
    """Sums the energy of samples; a counter that decreases was reset by a driver reload."""

    def __init__(self) -> None:
        self._counter: tuple[float, float] | None = None  # Time and J of the last sample.
        self._power: tuple[float, float] | None = None  # Time and W of the last sample.
        self._counted = EnergyUse(0.0, 0.0, from_counter=True)
        self._estimated = EnergyUse(0.0, 0.0, from_counter=False)

    def add(self, now: float, counter: float | None, power: float | None) -> None:
        """Add a sample at `now` (s): the counter in J, the power in W; None if missing."""
        if counter is not None:
            before, last = self._counter or (now, counter)
            self._counter = now, counter
            if counter >= last:
                self._counted = _plus(self._counted, counter - last, now - before)
        if power is not None:
            before, last = self._power or (now, power)
            self._power = now, power
            seconds = now - before
            if seconds <= MAX_GAP_S:
                self._estimated = _plus(self._estimated, seconds * (power + last) / 2, seconds)

    def energy(self) -> EnergyUse | None:
        """Return the energy so far; None before two samples."""
        known = [use for use in (self._counted, self._estimated) if use.seconds]
        return known[0] if known else None


def _plus(use: EnergyUse, joules: float, seconds: float) -> EnergyUse:
    return replace(use, joules=use.joules + joules, seconds=use.seconds + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of one GPU or MIG instance; metrics by key, in stored units, `ages` in seconds.

    `missing` has the reasons for missing metrics, also "processes" and "xid". `throttled` (of the
    last ten minutes at most) and `energy` begin at the first poll.
    """

    info: DeviceInfo
    facts: DeviceProperties | None
    values: Mapping[str, float]
    ages: Mapping[str, float]
    missing: Mapping[str, str]
    health: DeviceHealth
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)
    throttle_window_s: float = 0.0
    energy: EnergyUse | None = None
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
    energy, processes = device.energy, device.processes
    return {
        "uuid": device.info.uuid,
        "name": device.info.name,
        "index": device.info.nvml_index,
        "mig": device.info.mig,
        "facts": None if device.facts is None else asdict(device.facts),
        "values": dict(device.values),
        "ages": {key: round(age, 3) for key, age in device.ages.items()},
        "missing": dict(device.missing),
        "lost": device.lost,
        "health": asdict(device.health),
        "throttled": {
            "window_s": device.throttle_window_s,
            "text": throttle_text(device.throttled, device.throttle_window_s),
            "seconds": dict(device.throttled),
        },
        "energy": None if energy is None else asdict(energy),
        "xids": [asdict(xid) for xid in device.xids],
        "processes": None if processes is None else [asdict(process) for process in processes],
        "instances": [device_json(instance) for instance in device.instances],
    }
