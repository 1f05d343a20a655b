"""Determine the health of a GPU from its values, properties and events. Pure; no I/O.

Each function of RULES yields issues; of the most severe ones the first is the status. Thresholds
are those of the driver, if available.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.gpu.machine_state import (
    DeviceHealth,
    DeviceState,
    HealthIssue,
    HealthStatus,
)

POWER_CAP = 0x04
SLOWDOWN = 0x08
SW_THERMAL = 0x20
HW_THERMAL = 0x40
POWER_BRAKE = 0x80
"""Bits of nvmlClocksEventReasons (nvml.h)."""
_ALARMING = {
    SLOWDOWN: "hardware slowdown",
    SW_THERMAL: "software thermal slowdown",
    HW_THERMAL: "hardware thermal slowdown",
    POWER_BRAKE: "power brake",
}


def throttle_words(mask: int) -> list[str]:
    """Return the names of the abnormal bits: idle, power cap and a user's clocks are normal."""
    return [word for bit, word in _ALARMING.items() if mask & bit]


CALM_S = 2.0  # Time without a throttle reason after which throttling has ended.
BACK_S = 15.0
"""Time without a failure after which a lost GPU has recovered. It exceeds the 10 s between two
samples of the rare tier, at which a partly broken GPU is lost again."""

DeviceEvent = tuple[str, str, dict[str, Any]]  # Kind, text, data.

_WORSE = {
    "gpu/ecc_uncorrected": ("ecc", "memory errors that ECC could not correct"),
    "gpu/remapped_rows": ("remapped_rows", "rows of memory replaced by spare ones"),
}
"""Counters whose increase is an event: the kind of the event, and the counted errors."""


@dataclass(slots=True)
class DeviceEventDetector:
    """Detects the events of one GPU, called `label` in their texts."""

    label: str
    _lost: bool = False
    _lost_at: float = 0.0  # Time of the latest failure.
    _words: list[str] = field(default_factory=list)  # Reasons of the present throttling.
    _begun: float = 0.0
    _last_seen: float = 0.0
    _counts: dict[str, float] = field(default_factory=dict)

    def events(self, now: float, mask: float | None, lost: str | None) -> list[DeviceEvent]:
        """Return the events up to `now` (s); `mask` None: the throttle reasons are unknown."""
        events: list[DeviceEvent] = []
        if lost is not None:
            if not self._lost:
                events.append(("gpu_lost", f"{self.label}: {lost}", {}))
            self._lost = True
            self._lost_at = now
        elif self._lost and now - self._lost_at >= BACK_S:
            events.append(("gpu_recovered", f"{self.label}: answers again", {}))
            self._lost = False
        if mask is not None:
            events += self._throttle(now, throttle_words(int(mask)))
        return events

    def memory_errors(self, values: Mapping[str, float]) -> list[DeviceEvent]:
        """Return errors since the last call, none from before the first."""
        events: list[DeviceEvent] = []
        for key, (kind, what) in _WORSE.items():
            if key in values:
                more = values[key] - self._counts.get(key, values[key])
                self._counts[key] = values[key]
                if more > 0:
                    events.append((kind, f"{self.label}: {more:g} new {what}", {"count": more}))
        return events

    def _throttle(self, now: float, words: list[str]) -> list[DeviceEvent]:
        if words:
            self._last_seen = now
            if not self._words:
                self._words, self._begun = words, now
                text = f"{self.label}: clocks lowered by {', '.join(words)}"
                return [("throttle_start", text, {"words": words})]
            self._words = list(dict.fromkeys(self._words + words))
        elif self._words and now - self._last_seen >= CALM_S:
            ended, duration_s = self._words, self._last_seen - self._begun
            self._words = []
            text = f"{self.label}: clocks free again after {duration_s:.1f} s"
            return [("throttle_end", text, {"words": ended, "duration_s": duration_s})]
        return []


HOT_MARGIN = 5.0  # °C below the slowdown temperature; fans and load cause a few degrees.
MEMORY_FULL = 0.95  # Used fraction of the memory above which the next allocation may fail.
IDLE = 1.0  # Utilization (%) below which a GPU is idle.
XID_NEW_S = 600.0  # Maximum age of an Xid event that is an issue.
XID_PAGE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"

OK, NOTICE, WARNING, CRITICAL = HealthStatus


def health(state: DeviceState) -> DeviceHealth:
    """Apply all rules to one GPU."""
    if state.lost is not None:
        text = f"{state.lost[:1].upper()}{state.lost[1:].rstrip('.')}. Retrying."
        return DeviceHealth(CRITICAL, text, (HealthIssue(CRITICAL, text),))
    found = [issue for rule in RULES for issue in rule(state)]
    issues = tuple(sorted(found, key=lambda issue: -issue.level.rank))
    if issues:
        return DeviceHealth(issues[0].level, issues[0].text, issues)
    load = state.values.get("gpu/util")
    if load is None:
        return DeviceHealth(OK, "No problems found.")
    return DeviceHealth(OK, "Idle." if load < IDLE else "Working.")


def _errors(state: DeviceState) -> Iterator[HealthIssue]:
    count = state.values.get("gpu/ecc_uncorrected", 0)
    if count > 0:
        text = _number(count, "uncorrected memory error")
        text += " since the driver was loaded: results of that time may be wrong."
        yield HealthIssue(WARNING, text)
    recent = [xid for xid in state.xids if xid.age_s < XID_NEW_S]
    if recent:
        shown = min(recent, key=lambda xid: (-xid.level.rank, xid.age_s))
        total = f" ({len(recent)} in all)" if len(recent) > 1 else ""
        text = f"{shown.text}, {format_duration(shown.age_s)} ago{total}. See {XID_PAGE}"
        yield HealthIssue(shown.level, text)


def _heat(state: DeviceState) -> Iterator[HealthIssue]:
    temperature = state.values.get("gpu/temp")
    slowdown = None if state.facts is None else state.facts.temp_slowdown
    margin = state.values.get("gpu/temp_margin")
    if margin is None and temperature is not None and slowdown is not None:
        margin = slowdown - temperature
    degrees = "" if temperature is None else f": {temperature:.0f} °C"
    words = throttle_words(int(state.values.get("gpu/throttle_reasons", 0)))
    if words:
        limit = "" if slowdown is None else f", slowdown at {slowdown:.0f} °C"
        text = f"Clocks lowered now by {' and '.join(words)}{degrees}{limit}."
        yield HealthIssue(WARNING, text)
    elif margin is not None and margin <= HOT_MARGIN:
        text = f"Hot{degrees}, {max(0.0, margin):.0f} °C below its slowdown."
        yield HealthIssue(NOTICE, text)


def _processes(state: DeviceState) -> Iterator[HealthIssue]:
    dead = [process for process in state.processes or () if process.state == "zombie"]
    if dead:
        pids = ", ".join(f"{process.pid} ({process.name})" for process in dead[:3])
        text = f"{_number(len(dead), 'dead process', 'es')} still on the GPU: {pids}."
        yield HealthIssue(WARNING, f"{text} Kill the parent.")


def _memory(state: DeviceState) -> Iterator[HealthIssue]:
    values = state.values
    total = values.get("gpu/mem_total", 0)
    usable = total - values.get("gpu/mem_reserved", 0)
    used = values.get("gpu/mem_used", 0)
    if total and used >= MEMORY_FULL * usable:
        free = format_bytes(max(0.0, usable - used))
        yield HealthIssue(NOTICE, f"Memory nearly full: {free} of {format_bytes(total)} free.")
    if values.get("gpu/remap_failed", 0) > 0:
        text = "A bad memory row could not be remapped: contact the GPU vendor."
        yield HealthIssue(CRITICAL, text)
    elif values.get("gpu/remap_pending", 0) > 0:
        text = "Bad memory rows are pending remap; takes effect after a GPU reset."
        yield HealthIssue(WARNING, text)


def _power(state: DeviceState) -> Iterator[HealthIssue]:
    """Yield a cap below the GPU's default; a cap at its default is normal at full load."""
    limit = state.values.get("gpu/power_limit")
    default = None if state.facts is None else state.facts.power_limit_default
    is_capped = int(state.values.get("gpu/throttle_reasons", 0)) & POWER_CAP
    if is_capped and limit is not None and default is not None and limit < default - 1:
        text = f"Capped by a power limit of {limit:.0f} W below its default {default:.0f} W."
        yield HealthIssue(NOTICE, text)


def _number(count: float, what: str, plural: str = "s") -> str:
    return f"{count:.0f} {what}{'' if count == 1 else plural}"


RULES = (_errors, _heat, _processes, _memory, _power)
