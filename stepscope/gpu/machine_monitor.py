"""Poll every GPU and the host."""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from stepscope.gpu.health import health
from stepscope.gpu.machine_state import DeviceState, HostState, MachineState, XidEvent
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import DeviceSource
from stepscope.gpu.xid import XidWatcher
from stepscope.host.environment import cpu_name, installed_torch
from stepscope.host.usage import HostSampler

MAX_XIDS = 20
NOT_WATCHED = "they are not watched"  # The reason for unknown Xid events.
RARE_S = 10.0  # Period of values that change rarely: error counters, properties, MIG instances.


class MachineMonitor:
    """Polls this machine in one thread, with the source that `open_source` returns.

    The first poll opens NVML (tens of milliseconds). Rates of links are means since the poll
    before.
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
        self._devices: dict[str, DeviceState] = {}
        self._rare_at = -math.inf
        self._xids: deque[XidEvent] = deque(maxlen=MAX_XIDS)
        self._host = HostSampler()
        self.source: DeviceSource | None = None  # Of the latest poll.
        self.xid_watcher: XidWatcher | None = None  # Set by the thread that polls.

    def poll(self) -> MachineState:
        """Read the values that are due; return all. Takes some milliseconds for each GPU."""
        source = self._open_source()
        if source is not self.source:
            self.source = source
            self._devices = {info.uuid: DeviceState(info=info) for info in source.devices()}
            self._rare_at = -math.inf
        now = self._clock()
        is_rare = now >= self._rare_at
        if is_rare:
            self._rare_at = now + RARE_S
        ts = self._wall_clock()
        xids = [replace(xid, age_s=max(0.0, ts - xid.ts)) for xid in tuple(self._xids)]
        for uuid, device in self._devices.items():
            own = tuple(xid for xid in xids if xid.uuid == uuid)
            device = _read(source, replace(device, xids=own), is_rare=is_rare)
            reason = NOT_WATCHED if self.xid_watcher is None else self.xid_watcher.reason(uuid)
            if reason is not None:
                device = replace(device, missing={**device.missing, "xid": reason})
            self._devices[uuid] = device
        devices = tuple(self._devices.values())
        host = _host(self._host.host(), devices)
        return MachineState(ts=ts, reason=source.reason, devices=devices, host=host)

    def note_xid(self, event: XidEvent) -> None:
        """Add an Xid event of the present time. Thread-safe."""
        self._xids.append(replace(event, ts=self._wall_clock()))


def _read(source: DeviceSource, device: DeviceState, *, is_rare: bool) -> DeviceState:
    """Return the present state of a GPU or MIG instance, whose last one is `device`."""
    uuid = device.info.uuid
    is_rare = is_rare or device.lost is not None  # all values once the GPU is found
    tiers = [tier for tier in SamplingTier if is_rare or tier is not SamplingTier.RARE]
    new = source.read(uuid, *tiers)
    processes = source.processes(uuid)
    # A value without a reason to be missing is kept, because its period is longer.
    missing = {key: why for key, why in source.reasons(uuid).items() if key not in new}
    kept = {key: value for key, value in device.values.items() if key not in missing}
    device = replace(
        device, values=kept | new, missing=missing, processes=processes, lost=source.lost(uuid)
    )
    if is_rare:
        device = _read_rare(source, device)
    instances = [_read(source, instance, is_rare=is_rare) for instance in device.instances]
    device = replace(device, instances=tuple(instances))
    return replace(device, health=health(device))


def _read_rare(source: DeviceSource, device: DeviceState) -> DeviceState:
    """Return the state with properties and MIG instances of now."""
    uuid = device.info.uuid
    facts = source.facts(uuid) or device.facts
    known = {instance.info.uuid: instance for instance in device.instances}
    instances = [known.get(info.uuid, DeviceState(info=info)) for info in source.instances(uuid)]
    return replace(
        device,
        facts=facts,
        instances=tuple(instances),
    )


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
