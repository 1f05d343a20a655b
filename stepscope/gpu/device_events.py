"""Detect events of one GPU (lost, throttled, memory errors, recovery), and format throttling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.common.formatting import format_duration

REASONS: dict[str, str] = {  # The counters' throttle reasons, the worst first.
    "gpu/throttle_hw_thermal": "thermal slowdown (hardware)",
    "gpu/throttle_sw_thermal": "thermal slowdown (software)",
    "gpu/throttle_brake": "power brake",
    "gpu/throttle_power": "power-limited, normal at full load",
}
MIN_SHOWN_S = 0.05  # Half a tick of the sampler.


def throttle_times(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each throttle reason between samples; a reset counter counts from 0."""
    return {
        key: after[key] - before[key] if after[key] >= before[key] else after[key]
        for key in REASONS
        if key in before and key in after
    }


def throttle_text(times: Mapping[str, float], window_s: float | None) -> str:
    """Format the durations within a window (s), or since the driver was loaded, as a sentence."""
    if not times:
        return "Unknown: the driver does not report throttled time."
    span = "since the driver was loaded"
    if window_s is not None:
        span = f"in {format_duration(window_s)}"
    parts = []
    for key, seconds in times.items():
        if seconds >= MIN_SHOWN_S:
            text = f"{seconds:.1f} s" if seconds < 10 else format_duration(seconds)
            percent = f" ({min(1.0, seconds / window_s):.0%})" if window_s else ""
            parts.append(f"{text}{percent} {REASONS[key]}")
    return f"{span.capitalize()}: {'; '.join(parts)}." if parts else f"Not throttled {span}."


_ALARMING = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons (nvml.h)."""


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
