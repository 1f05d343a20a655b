"""What is known of one GPU from look to look: its newest values, and what they add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stepscope.gpu.device_info import DeviceFacts, DeviceInfo
from stepscope.gpu.energy import EnergyMeter
from stepscope.gpu.health import Evidence, Xid, health, slow_link
from stepscope.gpu.history import DRAWN, KEPT_S, History
from stepscope.gpu.machine_state import DeviceView
from stepscope.gpu.nvml_queries import Tier
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import DeviceSource
from stepscope.gpu.throttle_time import REASONS, throttle_times

SLOW_S, RARE_S = 0.9, 10.0
PERIODS = {Tier.FAST: 0.0, Tier.MEDIUM: 0.0, Tier.SLOW: SLOW_S, Tier.RARE: RARE_S}
"""Seconds after which a tier is read again; at one look a second the slow one is always due."""
INSTANCES_S = 10.0
"""Seconds after which MIG instances are looked for again: administrators change them."""


@dataclass(slots=True)
class _Tier:
    values: dict[str, float] = field(default_factory=dict)
    read_at: float = -math.inf


class DeviceReadings:
    """One GPU or MIG instance of a source; times are those of the monotonic clock."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.history = History((*DRAWN, *REASONS))
        self._tiers = {tier: _Tier() for tier in PERIODS}
        self._first: dict[str, float] = {}
        self._energy = EnergyMeter()
        self._facts: DeviceFacts | None = None
        self._processes: tuple[GpuProcess, ...] | None = None
        self._recovery: str | None = None
        self._slow_links = 0
        self._instances: dict[str, DeviceReadings] = {}
        self._instances_at = -math.inf

    def read(self, source: DeviceSource, now: float, ts: float) -> None:
        """Read what is due; `ts` is the same moment in epoch seconds."""
        uuid = self.info.uuid
        due = [tier for tier, kept in self._tiers.items() if now - kept.read_at >= PERIODS[tier]]
        for tier in due:
            # Each by itself: what it does not answer any more must not be shown as if it were new.
            values = source.read(uuid, tier)
            self._tiers[tier] = _Tier(self._not_asked(source, tier, values) | values, now)
        if Tier.SLOW in due:
            self._processes = source.processes(uuid)
        if Tier.RARE in due:
            self._facts = source.facts(uuid) or self._facts
            if self._facts is not None:
                self.info = replace(self.info, mig=self._facts.mig)
            self._recovery = source.recovery_action(uuid)
        values = self._values()
        if Tier.RARE in due:
            slow = self._facts is not None and slow_link(self._facts, values)
            self._slow_links = self._slow_links + 1 if slow else 0
        for key, value in values.items():
            self._first.setdefault(key, value)
        self._energy.add(now, values.get("gpu/energy"), values.get("gpu/power"))
        self.history.add(ts, values)
        self._read_instances(source, now, ts)

    def _not_asked(
        self, source: DeviceSource, tier: Tier, values: dict[str, float]
    ) -> dict[str, float]:
        """Return what is known of questions that the driver takes long to answer.

        They are asked less often than their tier, and then have no reason to be missing.
        """
        former = self._tiers[tier].values
        if former.keys() <= values.keys():
            return {}
        reasons = source.reasons(self.info.uuid)
        return {key: former[key] for key in former if key not in reasons}

    def _read_instances(self, source: DeviceSource, now: float, ts: float) -> None:
        if now - self._instances_at >= INSTANCES_S:
            self._instances_at = now
            found = source.instances(self.info.uuid)
            self._instances = {
                info.uuid: self._instances.get(info.uuid) or DeviceReadings(info) for info in found
            }
        for instance in self._instances.values():
            instance.read(source, now, ts)

    def _values(self) -> dict[str, float]:
        return {key: value for tier in self._tiers.values() for key, value in tier.values.items()}

    def view(
        self,
        source: DeviceSource,
        now: float,
        ts: float,
        xids: tuple[Xid, ...] = (),
        xid_reason: str | None = None,
    ) -> DeviceView:
        """Return what is known now; `xid_reason` says why errors of the driver are not."""
        uuid = self.info.uuid
        values = self._values()
        missing = {key: why for key, why in source.reasons(uuid).items() if key not in values}
        if xid_reason is not None:
            missing["xid"] = xid_reason
        lost = source.lost(uuid)
        evidence = Evidence(
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
        before = {key: self.history.oldest(key) for key in REASONS}
        known = {key: found for key, found in before.items() if found is not None}
        return DeviceView(
            info=self.info,
            facts=self._facts,
            values=values,
            ages={key: now - kept.read_at for kept in self._tiers.values() for key in kept.values},
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

    def find(self, uuid: str) -> DeviceReadings | None:
        """Return these readings, or those of an instance, by UUID."""
        return self if self.info.uuid == uuid else self._instances.get(uuid)
