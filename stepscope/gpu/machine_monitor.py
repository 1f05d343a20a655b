"""Looks at every GPU of this machine and at the machine, whether anything trains or not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from stepscope.gpu.history import History
from stepscope.gpu.host import Host
from stepscope.gpu.machine_state import DeviceView, MachineView
from stepscope.gpu.nvml_queries import Tier
from stepscope.gpu.readings import DeviceReadings
from stepscope.gpu.source import DeviceSource, NullSource
from stepscope.gpu.xid import XidEvent
from stepscope.gpu.xids import Xids

RATE_S = 0.2
"""Pause between the two readings of a look. PCIe's byte counters have 32 bits on some GPUs and wrap
within a third of a second, so only two readings as close as this tell a rate."""


class Machine:
    """What one thread sees of this machine; `open_source` gives it a source of its own.

    Where there is no GPU it looks for one again when the source says so: a driver can be loaded
    later. The first look opens NVML, which takes tens of milliseconds on a GPU machine.
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
        self._retry_at = -math.inf
        self._since: float | None = None
        self._devices: dict[str, DeviceReadings] = {}
        self._host = Host()
        self._xids = Xids()
        self.xid_reason: str | None = "they are not watched"
        """Why Xid errors are not told; None while somebody passes them to `note_xid`."""
        self.xid_refused: Mapping[str, str] = {}
        """Why those of some GPUs are not told, by UUID."""
        self._armed = False

    def arm(self, armed: bool) -> None:
        """Read the counters of SM, tensor and DRAM activity, or leave them to other programs."""
        if self._source is not None and armed != self._armed:
            self._source.arm_gpm(armed)
        self._armed = armed

    def look(self) -> MachineView:
        """Read what is due and return all that is known; takes RATE_S and some ms for each GPU."""
        source = self._opened()
        for uuid in self._devices:
            source.read(uuid, Tier.FAST)
            source.begin_rates(uuid)  # what a counter did between the looks is not known
        if self._devices:
            self._pause(RATE_S)
        now, ts = self._clock(), self._wall_clock()
        if self._since is None:
            self._since = ts
        for readings in self._devices.values():
            readings.read(source, now, ts)
        devices = tuple(
            readings.view(source, now, ts, self._xids.of(uuid, ts), self._xid_reason(uuid))
            for uuid, readings in self._devices.items()
        )
        return MachineView(
            ts=ts,
            since=self._since,
            reason=source.reason,
            devices=devices,
            host=self._host.look(*_versions(devices)),
        )

    def _xid_reason(self, uuid: str) -> str | None:
        return self.xid_reason or self.xid_refused.get(uuid)

    def history(self, uuid: str) -> History | None:
        """Return the last ten minutes of a GPU or MIG instance; None for one that is not known."""
        found = (readings.find(uuid) for readings in tuple(self._devices.values()))
        return next((readings.history for readings in found if readings is not None), None)

    def note_xid(self, event: XidEvent) -> None:
        """Remember an error that the driver reported just now; from any thread."""
        self._xids.add(self._wall_clock(), event)

    @property
    def source(self) -> DeviceSource:
        """The source that was opened by the latest look, opened now where there was none."""
        return self._opened()

    def _opened(self) -> DeviceSource:
        if self._source is None or self._clock() >= self._retry_at:
            source = self._source = self._open_source()
            self._retry_at = source.retry_at if isinstance(source, NullSource) else math.inf
            if self._armed:
                source.arm_gpm(True)
            self._since = None  # what is added up begins at the next look
            self._devices = {info.uuid: DeviceReadings(info) for info in source.devices()}
        return self._source


def _versions(devices: tuple[DeviceView, ...]) -> tuple[str | None, str | None]:
    """Return the versions of the driver and of the CUDA that it offers."""
    if not devices:
        return None, None
    facts = devices[0].facts
    return devices[0].info.driver_version, None if facts is None else facts.cuda_version
