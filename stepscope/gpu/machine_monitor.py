"""Poll every GPU and the host once a second, and keep the recent history."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stepscope.gpu.device_events import REASONS, throttle_times
from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.health import HealthInputs, XidRecord, health, slow_link
from stepscope.gpu.machine_state import DeviceState, EnergyMeter, HostState, MachineState
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import DeviceSource
from stepscope.gpu.xid import XidEvent, XidLog
from stepscope.host.environment import cpu_name
from stepscope.host.usage import HostSampler

KEPT_S, KEPT_READINGS = 600.0, 600  # About 0.4 MB a GPU (benchmarks/devices.py).

_DRAWN = "util sm_active tensor_active dram_active mem_used power temp sm_clock pcie_tx pcie_rx"
DRAWN = tuple(f"gpu/{name}" for name in f"{_DRAWN} nvlink_tx nvlink_rx".split())
"""Metrics that the page draws as lines."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """All values of one GPU at `ts` (epoch seconds)."""

    ts: float
    values: tuple[float | None, ...]


class DeviceHistory:
    """The samples of one GPU. One thread adds; reading is thread-safe."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.seen: set[str] = set()  # Metrics that have had a value.
        self._readings: deque[DeviceSample] = deque(maxlen=KEPT_READINGS)

    def add(self, ts: float, values: Mapping[str, float]) -> None:
        """Add a sample, and discard samples older than KEPT_S."""
        self.seen |= values.keys()
        self._readings.append(DeviceSample(ts, tuple(values.get(key) for key in self.keys)))
        while self._readings[0].ts < ts - KEPT_S:
            self._readings.popleft()

    def oldest(self, key: str) -> tuple[float, float] | None:
        """Return the time and value of a metric's oldest sample."""
        place = self.keys.index(key)
        for sample in tuple(self._readings):
            value = sample.values[place]
            if value is not None:
                return sample.ts, value
        return None

    def since(self, ts: float) -> list[DeviceSample]:
        """Return the samples after `ts` (epoch seconds)."""
        return [sample for sample in tuple(self._readings) if sample.ts > ts]


@functools.cache  # because it searches the folders of all packages
def torch_version() -> str | None:
    """Return the version of the installed torch without importing torch; None without torch."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return None


RARE_S = 10.0  # Period of values that change rarely: error counters, properties, MIG instances.


class DeviceMonitor:
    """Polls one GPU or MIG instance of a source; times are of the monotonic clock."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.history = DeviceHistory((*DRAWN, *REASONS))
        self._read: dict[str, tuple[float, float]] = {}  # Key -> value, time.
        self._rare_at = -math.inf
        self._first: dict[str, float] = {}
        self._energy = EnergyMeter()
        self._facts: DeviceProperties | None = None
        self._processes: tuple[GpuProcess, ...] | None = None
        self._recovery: str | None = None
        self._slow_links = 0
        self._instances: dict[str, DeviceMonitor] = {}

    def read(self, source: DeviceSource, now: float, ts: float) -> None:
        """Read the values that are due; `ts` is `now` in epoch seconds."""
        uuid, rare = self.info.uuid, now >= self._rare_at
        tiers = [tier for tier in SamplingTier if rare or tier is not SamplingTier.RARE]
        new = {key: (value, now) for key, value in source.read(uuid, *tiers).items()}
        # A value without a reason to be missing is kept, because its period is longer.
        reasons = source.reasons(uuid)
        self._read = {k: kept for k, kept in self._read.items() if k not in reasons} | new
        values = self._values()
        self._processes = source.processes(uuid)
        if rare:
            self._rare_at = now + RARE_S
            self._facts = source.facts(uuid) or self._facts
            if self._facts is not None:
                self.info = replace(self.info, mig=self._facts.mig)
            self._recovery = source.recovery_action(uuid)
            slow = self._facts is not None and slow_link(self._facts, values)
            self._slow_links = self._slow_links + 1 if slow else 0
            self._instances = {
                info.uuid: self._instances.get(info.uuid) or DeviceMonitor(info)
                for info in source.instances(uuid)
            }
        if source.lost(uuid) is not None:
            self._rare_at = -math.inf  # read all values as soon as the GPU is found
        self._first = values | self._first
        self._energy.add(now, values.get("gpu/energy"), values.get("gpu/power"))
        self.history.add(ts, values)
        for instance in self._instances.values():
            instance.read(source, now, ts)

    def _values(self) -> dict[str, float]:
        return {key: value for key, (value, _) in self._read.items()}

    def view(
        self,
        source: DeviceSource,
        now: float,
        ts: float,
        xids: tuple[XidRecord, ...] = (),
        xid_reason: str | None = None,
    ) -> DeviceState:
        """Return the present state; `xid_reason` is the reason for unknown Xid events."""
        uuid = self.info.uuid
        values = self._values()
        missing = {key: why for key, why in source.reasons(uuid).items() if key not in values}
        if xid_reason is not None:
            missing["xid"] = xid_reason
        lost = source.lost(uuid)
        evidence = HealthInputs(
            values=values,
            first=self._first,
            missing=missing,
            facts=self._facts,
            processes=self._processes or (),
            lost=lost,
            recovery=self._recovery,
            xids=xids,
            slow_links=self._slow_links,
        )
        oldest = self.history.oldest
        known = {key: found for key in REASONS if (found := oldest(key)) is not None}
        return DeviceState(
            info=self.info,
            facts=self._facts,
            values=values,
            ages={key: now - read_at for key, (_, read_at) in self._read.items()},
            missing=missing,
            health=health(evidence),
            processes=self._processes,
            lost=lost,
            throttled=throttle_times({key: value for key, (_, value) in known.items()}, values),
            throttle_window_s=min(KEPT_S, max((ts - at for at, _ in known.values()), default=0.0)),
            energy=self._energy.energy(),
            xids=xids,
            instances=tuple(one.view(source, now, ts) for one in self._instances.values()),
        )

    def find(self, uuid: str) -> DeviceMonitor | None:
        """Return the monitor of this UUID: this one, or that of an instance, or None."""
        return self if self.info.uuid == uuid else self._instances.get(uuid)


RATE_S = 0.2  # Between the readings of a poll: 32-bit PCIe counters wrap in a third of a second.


class MachineMonitor:
    """Polls this machine in one thread, with a source of its own from `open_source`.

    Without a GPU it retries later. The first poll opens NVML (tens of milliseconds).
    """

    def __init__(
        self,
        open_source: Callable[[], DeviceSource],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._open_source = open_source
        self._clock = clock
        self._wall_clock = wall_clock
        self._pause = pause
        self._source: DeviceSource | None = None
        self._since: float | None = None
        self._devices: dict[str, DeviceMonitor] = {}
        self._host = HostSampler()
        self._xids = XidLog()
        self.xid_reason: str | None = "they are not watched"  # None while `note_xid` gets them.
        self.xid_refused: Mapping[str, str] = {}  # The reasons for some GPUs, by UUID.
        self._armed = False

    def arm(self, armed: bool) -> None:
        """Enable or disable the counters of SM, tensor and DRAM activity."""
        if self._source is not None and armed != self._armed:
            self._source.arm_gpm(armed)
        self._armed = armed

    def look(self) -> MachineState:
        """Read the values that are due; return all. Takes RATE_S, and some ms for each GPU."""
        source = self.source
        for uuid in self._devices:
            source.read(uuid, SamplingTier.FAST)
        if self._devices:
            self._pause(RATE_S)
        now, ts = self._clock(), self._wall_clock()
        if self._since is None:
            self._since = ts
        for device in self._devices.values():
            device.read(source, now, ts)
        reason, refused = self.xid_reason, self.xid_refused
        devices = tuple(
            device.view(source, now, ts, self._xids.of(uuid, ts), reason or refused.get(uuid))
            for uuid, device in self._devices.items()
        )
        host = _host(self._host.host(), devices)
        return MachineState(
            ts=ts, since=self._since, reason=source.reason, devices=devices, host=host
        )

    def history(self, uuid: str) -> DeviceHistory | None:
        """Return the last ten minutes of a GPU or MIG instance; None for an unknown UUID."""
        found = (device.find(uuid) for device in tuple(self._devices.values()))
        return next((device.history for device in found if device is not None), None)

    def note_xid(self, event: XidEvent) -> None:
        """Add an Xid event of the present time. Thread-safe."""
        self._xids.add(self._wall_clock(), event)

    @property
    def source(self) -> DeviceSource:
        """The source of the latest poll, opened now if there is none."""
        if self._source is None or self._clock() >= self._source.retry_at:
            source = self._source = self._open_source()
            if self._armed:
                source.arm_gpm(True)
            self._since = None  # sums begin at the next poll
            self._devices = {info.uuid: DeviceMonitor(info) for info in source.devices()}
        return self._source


def _host(values: Mapping[str, float], devices: tuple[DeviceState, ...]) -> HostState:
    facts = devices[0].facts if devices else None
    return HostState(
        name=socket.gethostname(),
        cpu=cpu_name(),
        cores=os.cpu_count(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch_version(),
        driver=devices[0].info.driver_version if devices else None,
        cuda=None if facts is None else facts.cuda_version,
        cpu_percent=values.get("host/cpu"),
        memory_used=values["host/mem_used"],
        memory_total=values["host/mem_total"],
    )
