"""Memory by batch size, the largest that fits, and the one to recommend. Pure but for `predict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config_limits import LIMITS

HEADROOM = 0.10
"""Share of the free memory that the recommended batch leaves."""
NEAR_BEST = 0.02
"""Throughput within this share of the best counts as the best: noise, and a smaller batch learns
more from each sample."""
STEPS_OF_SEARCH = 4
"""Bisections after the size that no longer fits: the limit is known within a sixteenth."""

Needs = Callable[[int], tuple[int, int, int]]
"""Predicted peak and needed bytes of a batch size, and the samples of an epoch, which limit it."""


@dataclass(frozen=True, slots=True)
class Point:
    """A batch size, its predicted peak, what it needs with margin, and its measured throughput."""

    batch_size: int
    peak: int
    needed: int
    samples_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points by batch size, the limit, and a recommendation; None with the reason in `why`."""

    points: tuple[Point, ...]
    room: int | None
    """Free bytes."""
    largest: int | None = None
    """The largest batch that is predicted to fit with headroom."""
    recommended: int | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON values."""
        return {
            "points": [
                {
                    "batch_size": point.batch_size,
                    "predicted_peak_bytes": point.peak,
                    "needed_bytes": point.needed,
                    "samples_per_sec": point.samples_per_s,
                }
                for point in self.points
            ],
            "free_bytes": self.room,
            "headroom": HEADROOM,
            "largest": self.largest,
            "recommended": self.recommended,
            "why": self.why,
        }


def explore(needs: Needs, now: int, room: int | None) -> tuple[Point, ...]:
    """Predict sizes from 1 up to the first that does not fit, and near the limit.

    `now` is the chosen size. Without a known `room` sizes up to four times that are looked at.
    """
    found: dict[int, Point] = {}
    most = int(LIMITS["batch_size"][1])

    def fits(size: int) -> bool:
        nonlocal most
        if size not in found:
            peak, needed, samples = needs(size)
            most = min(int(LIMITS["batch_size"][1]), samples)
            if size > samples:  # a batch that no epoch has
                return False
            found[size] = Point(size, peak, needed)
        return room is None or found[size].needed <= room * (1 - HEADROOM)

    fits(now)
    size = 1
    while size <= min(most, 4 * now if room is None else most) and fits(size):
        size *= 2
    low, high = size // 2, size
    if high > most:
        high = most
        if fits(high):
            return _in_order(found)
    for _ in range(STEPS_OF_SEARCH if room is not None else 0):
        middle = (low + high) // 2
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _in_order(found)


def with_rates(points: Sequence[Point], rates: Mapping[int, float]) -> tuple[Point, ...]:
    """Return the points with the throughput that was measured at their size."""
    return tuple(
        replace(point, samples_per_s=rates.get(point.batch_size, point.samples_per_s))
        for point in points
    )


def curve(points: Sequence[Point], room: int | None) -> Curve:
    """Return the curve with its limit and the recommended batch."""
    found = Curve(points=tuple(points), room=room)
    if room is None:
        return replace(found, why="Free memory is unknown, so no limit can be shown.")
    fitting = [point for point in points if point.needed <= room * (1 - HEADROOM)]
    if not fitting:
        why = (
            "Even batch size 1 leaves less than 10 % of the free memory. Use a smaller model, "
            "activation checkpointing, or another device."
        )
        return replace(found, why=why)
    largest = max(point.batch_size for point in fitting)
    recommended, why = _recommended(fitting, largest)
    return replace(found, largest=largest, recommended=recommended, why=why)


def _recommended(fitting: Sequence[Point], largest: int) -> tuple[int | None, str]:
    """Return the smallest batch whose throughput is within 2 % of the best, and a sentence on it.

    `fitting` are those that leave 10 % of the free memory.
    """
    rates = {
        point.batch_size: point.samples_per_s
        for point in fitting
        if point.samples_per_s is not None
    }
    if len(rates) < 2:
        return None, (
            f"Batch size {largest:,} fits with 10 % headroom. A recommendation needs throughput "
            f"at two of these sizes; {len(rates)} measured."
        )
    best = max(rates.values())
    chosen = min(size for size, rate in rates.items() if rate >= (1 - NEAR_BEST) * best)
    return chosen, (
        f"Batch size {chosen:,} reaches {rate_text(rates[chosen])} samples/s, "
        f"{_of_best(rates[chosen], best)}, with 10 % of the free memory to spare; {largest:,} "
        "is the largest that fits with that headroom."
    )


def rate_text(rate: float) -> str:
    """Return samples per second as text.

    >>> rate_text(52_604.3), rate_text(3.14159)
    ('52,604', '3.14')
    """
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _of_best(rate: float, best: float) -> str:
    return (
        "the best measured" if rate == best else f"{100 * rate / best:.0f} % of the best measured"
    )


def _in_order(found: Mapping[int, Point]) -> tuple[Point, ...]:
    return tuple(found[size] for size in sorted(found))
