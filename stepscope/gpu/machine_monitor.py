"""Poll every GPU and the host once a second, and keep the recent history."""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.health import health, is_link_slow
from stepscope.gpu.machine_state import DeviceState, HostState, MachineState, XidEvent
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import DeviceSource
from stepscope.gpu.xid import XidWatcher
from stepscope.host.environment import cpu_name, installed_torch
from stepscope.host.usage import HostSampler

KEPT_S = 600.0
KEPT_READINGS = 600  # About 0.4 MB a GPU.
MAX_XIDS = 20  # Of one GPU.
NOT_WATCHED = "they are not watched"  # The reason for unknown Xid events.

DRAWN = (
    "gpu/util",
    "gpu/sm_active",
    "gpu/tensor_active",
    "gpu/dram_active",
    "gpu/mem_used",
    "gpu/power",
    "gpu/temp",
    "gpu/sm_clock",
    "gpu/pcie_tx",
    "gpu/pcie_rx",
    "gpu/nvlink_tx",
    "gpu/nvlink_rx",
)
"""Metrics that the page draws as lines."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The DRAWN metrics of one GPU at `ts` (epoch seconds)."""

    ts: float
    values: tuple[float | None, ...]


class DeviceHistory:
    """The readings of one GPU. One thread adds; reading is thread-safe."""

    def __init__(self) -> None:
        self.seen: set[str] = set()  # Metrics that have had a value.
        self._readings: deque[DeviceReading] = deque(maxlen=KEPT_READINGS)

    def add(self, ts: float, values: Mapping[str, float]) -> None:
        """Add a reading, and discard readings older than KEPT_S."""
        self.seen |= values.keys()
        self._readings.append(DeviceReading(ts, tuple(values.get(key) for key in DRAWN)))
        while self._readings[0].ts < ts - KEPT_S:
            self._readings.popleft()

    def readings(self) -> tuple[DeviceReading, ...]:
        """Return the readings, the oldest first."""
        return tuple(self._readings)


RARE_S = 10.0  # Period of values that change rarely: error counters, properties, MIG instances.


class DeviceMonitor:
    """Polls one GPU or MIG instance of a source; times are of the monotonic clock."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.history = DeviceHistory()
        self.xids: deque[XidEvent] = deque(maxlen=MAX_XIDS)
        self.instances: dict[str, DeviceMonitor] = {}
        self._values: dict[str, float] = {}
        self._rare_at = -math.inf
        self._first: dict[str, float] = {}
        self._first_ts: float | None = None
        self._facts: DeviceProperties | None = None
        self._recovery: str | None = None
        self._is_link_slow = False

    def poll(
        self, source: DeviceSource, now: float, ts: float, xid_reason: str | None = None
    ) -> DeviceState:
        """Read the values that are due; return the present state. `ts` is `now` as epoch seconds.

        `xid_reason` is the reason for unknown Xid events.
        """
        uuid = self.info.uuid
        is_rare = now >= self._rare_at
        tiers = [tier for tier in SamplingTier if is_rare or tier is not SamplingTier.RARE]
        new = source.read(uuid, *tiers)
        # A value without a reason to be missing is kept, because its period is longer.
        missing = {key: why for key, why in source.reasons(uuid).items() if key not in new}
        values = {key: value for key, value in self._values.items() if key not in missing} | new
        self._values = values
        if is_rare:
            self._poll_rare(source)
            self._rare_at = now + RARE_S
        lost = source.lost(uuid)
        if lost is not None:  # all values are read as soon as the GPU is found
            self._rare_at = -math.inf
        self._first = values | self._first
        self._first_ts = ts if self._first_ts is None else self._first_ts
        self.history.add(ts, values)
        if xid_reason is not None:
            missing["xid"] = xid_reason
        processes = source.processes(uuid)
        xids = tuple(replace(xid, age_s=max(0.0, ts - xid.ts)) for xid in tuple(self.xids))
        state = DeviceState(
            info=self.info,
            facts=self._facts,
            values=values,
            missing=missing,
            first=self._first,
            seconds=ts - self._first_ts,
            processes=processes,
            lost=lost,
            recovery=self._recovery,
            xids=xids,
            is_link_slow=self._is_link_slow,
            instances=tuple(one.poll(source, now, ts) for one in self.instances.values()),
        )
        return replace(state, health=health(state))

    def _poll_rare(self, source: DeviceSource) -> None:
        uuid = self.info.uuid
        self._facts = source.facts(uuid) or self._facts
        self._recovery = source.recovery_action(uuid)
        if self._facts is not None:
            self.info = replace(self.info, mig=self._facts.mig)
            self._is_link_slow = is_link_slow(self._facts, self._values)
        self.instances = {
            info.uuid: self.instances.get(info.uuid) or DeviceMonitor(info)
            for info in source.instances(uuid)
        }


class MachineMonitor:
    """Polls this machine in one thread, with a source of its own from `open_source`.

    Without a GPU it retries later. The first poll opens NVML (tens of milliseconds). Rates of links
    are means since the poll before.
    """

    def __init__(
        self,
        open_source: Callable[[], DeviceSource],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._open_source = open_source
        self._clock = clock
        self._wall_clock = wall_clock
        self._source: DeviceSource | None = None
        self._since: float | None = None
        self._devices: dict[str, DeviceMonitor] = {}
        self._host = HostSampler()
        self.xid_watcher: XidWatcher | None = None  # Set by the thread that polls.

    def poll(self) -> MachineState:
        """Read the values that are due; return all. Takes some milliseconds for each GPU."""
        source = self.source
        now = self._clock()
        ts = self._wall_clock()
        if self._since is None:
            self._since = ts
        devices = tuple(
            device.poll(source, now, ts, self._xid_reason(uuid))
            for uuid, device in self._devices.items()
        )
        return MachineState(
            ts=ts,
            since=self._since,
            reason=source.reason,
            devices=devices,
            host=_host(self._host.host(), devices),
        )

    def history(self, uuid: str) -> DeviceHistory | None:
        """Return the last ten minutes of a GPU or MIG instance; None for an unknown UUID."""
        for device in tuple(self._devices.values()):
            found = device if device.info.uuid == uuid else device.instances.get(uuid)
            if found is not None:
                return found.history
        return None

    def _xid_reason(self, uuid: str) -> str | None:
        """Return why Xid events of a GPU are unknown; None if they are known."""
        return NOT_WATCHED if self.xid_watcher is None else self.xid_watcher.reason(uuid)

    def note_xid(self, event: XidEvent) -> None:
        """Add an Xid event of the present time. Thread-safe."""
        device = self._devices.get(event.uuid)
        if device is not None:
            device.xids.append(replace(event, ts=self._wall_clock()))

    @property
    def source(self) -> DeviceSource:
        """The source of the latest poll, opened now if there is none."""
        if self._source is None or self._clock() >= self._source.retry_at:
            source = self._source = self._open_source()
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
        torch=installed_torch(),
        driver=devices[0].info.driver_version if devices else None,
        cuda=None if facts is None else facts.cuda_version,
        cpu_percent=values.get("host/cpu"),
        memory_used=values["host/mem_used"],
        memory_total=values["host/mem_total"],
    )
