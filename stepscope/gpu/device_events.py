"""Detect events of one GPU: lost, throttled, memory errors, recovery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    _recovery: str | None = None

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

    def health(self, values: Mapping[str, float], recovery: str | None) -> list[DeviceEvent]:
        """Return errors since the last call, none from before the first; a new recovery action."""
        events: list[DeviceEvent] = []
        for key, (kind, what) in _WORSE.items():
            if key in values:
                more = values[key] - self._counts.get(key, values[key])
                self._counts[key] = values[key]
                if more > 0:
                    events.append((kind, f"{self.label}: {more:g} new {what}", {"count": more}))
        if recovery is not None and recovery != self._recovery:
            text = f"{self.label}: the driver reports: {recovery}"
            events.append(("gpu_recovery_action", text, {"action": recovery}))
        self._recovery = recovery
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
