"""The readings of one GPU as events: lost, throttled, memory errors, a wish of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.gpu.throttling import throttle_words

CALM_S = 2.0  # throttling has ended when no reason for it was seen for this long
BACK_S = 15.0
"""A lost GPU is back when nothing was lost for this long.

Longer than the 10 s from one reading of the slowest values to the next, after which one that is
partly broken is lost again.
"""

Event = tuple[str, str, dict[str, Any]]  # kind, text, data

_WORSE = {
    "gpu/ecc_uncorrected": ("ecc", "memory errors that ECC could not correct"),
    "gpu/remapped_rows": ("remapped_rows", "rows of memory replaced by spare ones"),
}
"""Counters whose rise is an event: its kind and what is counted."""


@dataclass(slots=True)
class SampledDevice:
    """What was last known of one GPU; `label` names it in the texts."""

    label: str
    _lost: bool = False
    _lost_at: float = 0.0  # when it was lost last
    _words: list[str] = field(default_factory=list)  # reasons of the throttling that goes on now
    _begun: float = 0.0
    _last_seen: float = 0.0
    _counts: dict[str, float] = field(default_factory=dict)
    _recovery: str | None = None

    def events(self, now: float, mask: float | None, lost: str | None) -> list[Event]:
        """Return what has happened by `now` (s); `mask` None means not known."""
        events: list[Event] = []
        if lost is not None and not self._lost:
            events.append(("gpu_lost", f"{self.label}: {lost}", {}))
            self._lost = True
        elif lost is None and self._lost and now - self._lost_at >= BACK_S:
            events.append(("gpu_recovered", f"{self.label}: answers again", {}))
            self._lost = False
        if lost is not None:
            self._lost_at = now
        if mask is not None:
            events += self._throttle(now, throttle_words(int(mask)))
        return events

    def health(self, values: Mapping[str, float], recovery: str | None) -> list[Event]:
        """Return the errors since the last call, and what the driver now wants done, if it is new.

        The first call only takes the counts: errors from before the run are not of the run.
        """
        events: list[Event] = []
        for key, (kind, what) in _WORSE.items():
            if key in values:
                more = values[key] - self._counts.get(key, values[key])
                self._counts[key] = values[key]
                if more > 0:
                    events.append((kind, f"{self.label}: {more:g} new {what}", {"count": more}))
        if recovery is not None and recovery != self._recovery:
            text = f"{self.label}: the driver says that {recovery}"
            events.append(("gpu_recovery_action", text, {"action": recovery}))
        self._recovery = recovery
        return events

    def _throttle(self, now: float, words: list[str]) -> list[Event]:
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
