"""How long a GPU was kept from its full clock, by reason, in words. Pure.

The driver counts the time for each reason since it was loaded, so a window's time is a difference.
Several reasons can hold at once: their times must not be added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stepscope.common.formatting import format_duration

REASONS: dict[str, str] = {
    "gpu/throttle_hw_thermal": "slowed by heat (hardware)",
    "gpu/throttle_sw_thermal": "slowed by heat (driver)",
    "gpu/throttle_brake": "slowed by the power brake",
    "gpu/throttle_power": "held by the power limit, which is normal at full load",
}
"""What each counter means, what should not be first."""
SHORTEST_S = 0.05
"""Less than this is not worth a word: half a tick of the sampler."""


@dataclass(frozen=True, slots=True)
class ThrottleTime:
    """Seconds of a window in which one reason held, in words."""

    key: str
    words: str
    seconds: float


def throttle_times(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[ThrottleTime, ...]:
    """Return the time for each reason that both readings have; seconds.

    A counter that fell began again: the driver was loaded anew, and what it counts now is the time.
    """
    times = []
    for key, words in REASONS.items():
        if key in before and key in after:
            passed = after[key] - before[key]
            times.append(ThrottleTime(key, words, passed if passed >= 0 else after[key]))
    return tuple(times)


def throttle_text(times: tuple[ThrottleTime, ...], window_s: float) -> str:
    """Say in one sentence for how long of `window_s` seconds each reason held."""
    span = f"in {format_duration(window_s)}"
    return _sentence(times, span, lambda seconds: _share(seconds, window_s))


def throttle_total(values: Mapping[str, float]) -> str:
    """Say for how long each reason held since the driver was loaded, from its counters."""
    times = throttle_times(dict.fromkeys(REASONS, 0.0), values)
    return _sentence(times, "since the driver was loaded", lambda seconds: "")


def _sentence(times: tuple[ThrottleTime, ...], span: str, share: Callable[[float], str]) -> str:
    if not times:
        return "Not told: the driver does not count the time for which clocks are lowered."
    long = [time for time in times if time.seconds >= SHORTEST_S]
    if not long:
        return f"Not lowered {span}."
    parts = [f"{_seconds(time.seconds)}{share(time.seconds)} {time.words}" for time in long]
    return f"{span[:1].upper()}{span[1:]}: {'; '.join(parts)}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else format_duration(seconds)


def _share(seconds: float, window_s: float) -> str:
    return f" ({100 * min(1.0, seconds / window_s):.0f} %)" if window_s > 0 else ""
