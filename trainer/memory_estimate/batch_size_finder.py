"""Memory by batch size, the largest size that fits, and a recommended size."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from stepscope.common.formatting import three_digits
from stepscope.lab.trial_process import TrialProcess
from trainer.config import RunConfig, limits_of

HEADROOM = 0.10  # Fraction of the free memory that no recommended batch may use.
NEAR_BEST = 0.05  # Largest loss of throughput for a smaller batch, which needs less memory.
LEVEL = 0.95  # Of the confidence interval of that loss.
BISECTIONS = 4  # Below the first size that does not fit: the limit is exact to a sixteenth.

WARMUP_STEPS, SECONDS = 3, 1.5
ROUNDS = 3
"""Runs of each size. A round has each size once, so that drift affects all sizes alike."""
MAX_SIZES = 5
MAX_STEP_S = 4.0  # Sizes with a longer step, extrapolated from the size before, are skipped.
TIMEOUT_S = 60.0
PREFIX = "stepscope-batch-"
MAX_AGE_S = 3600.0  # Older temporary folders are those of killed processes.

Progress = Callable[[str, float], None]  # Called with the current activity and the fraction done.
Needs = Callable[[int], tuple[int, int, int]]
"""Returns the peak and needed bytes of a batch size, and the samples of an epoch."""
Rates = Mapping[int, Sequence[float]]  # Measured samples/s by batch size, one value per round.


@dataclass(frozen=True, slots=True)
class Point:
    """A batch size, its predicted peak, and the needed bytes with the safety margin."""

    batch_size: int
    peak: int
    needed: int


def explore(needs: Needs, now: int, free: int | None) -> tuple[Point, ...]:
    """Predict sizes from 1 up to the first that does not fit, then bisect the limit.

    `now` is the configured size. If `free` is unknown, sizes end at four times `now`.
    """
    found: dict[int, Point] = {}
    most = int(limits_of("batch_size")[1])

    def fits(size: int) -> bool:
        nonlocal most
        if size not in found:
            peak, needed, samples = needs(size)
            most = min(most, samples)
            if size > samples:
                return False
            found[size] = Point(size, peak, needed)
        return free is None or has_headroom(found[size], free)

    fits(now)
    size = 1
    while size <= min(most, 4 * now if free is None else most) and fits(size):
        size *= 2
    low, high = size // 2, size
    if high > most:
        high = most
        low = high if fits(high) else low
    for _ in range(BISECTIONS if free is not None else 0):
        middle = (low + high) // 2
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return tuple(found[size] for size in sorted(found))


def has_headroom(point: Point, free: int) -> bool:
    """Return True if a batch leaves the headroom free."""
    return point.needed <= free * (1 - HEADROOM)


def curve(points: Sequence[Point], free: int | None, rates: Rates) -> dict[str, Any]:
    """Return the sizes, the largest that fits and a recommended one (or None), as JSON values."""
    largest, recommended, why = _choice(points, free, rates)
    measured = [rates.get(point.batch_size, ()) for point in points]
    return {
        "points": [
            {
                "batch_size": point.batch_size,
                "predicted_peak_bytes": point.peak,
                "needed_bytes": point.needed,
                "samples_per_sec": statistics.median(runs) if len(runs) else None,
                "samples_per_sec_runs": list(runs),
            }
            for point, runs in zip(points, measured, strict=True)
        ],
        "free_bytes": free,
        "headroom": HEADROOM,
        "largest": largest,
        "recommended": recommended,
        "why": why,
    }


def _choice(
    points: Sequence[Point], free: int | None, rates: Rates
) -> tuple[int | None, int | None, str]:
    """Return the largest batch that fits, the recommended one, and why."""
    if free is None:
        return None, None, "Free memory is unknown, so the largest batch is unknown."
    fitting = [point.batch_size for point in points if has_headroom(point, free)]
    if not fitting:
        why = (
            "Even batch size 1 leaves less than 10% of the free memory. Use a smaller model, "
            "activation checkpointing, or another device."
        )
        return None, None, why
    largest = max(fitting)
    limit = f"{largest:,} is the largest batch that leaves 10% of the free memory."
    if largest == max(point.batch_size for point in points):
        limit = (
            f"{largest:,}, the largest batch of this dataset, leaves at least 10% of the free "
            "memory."
        )
    recommended, why = _knee({size: rates[size] for size in fitting if size in rates})
    return largest, recommended, f"{why} {limit}"


def _knee(rates: Rates) -> tuple[int | None, str]:
    """Return the smallest batch that is shown to be nearly as fast as the fastest, and why.

    The fastest has the largest median. The loss of a smaller batch is the mean over rounds of the
    log ratio within a round. Its one-sided upper limit by Student's t uses the pooled variance of
    all sizes, so an outlier cannot recommend a smaller batch.
    """
    rounds = min(map(len, rates.values()), default=0)
    if len(rates) < 2 or rounds < 2:
        return None, "No recommendation: it needs the throughput of two sizes, measured twice."
    fastest = max(rates, key=lambda size: statistics.median(rates[size]))
    others = [size for size in rates if size != fastest]
    logs = np.log([rates[size][:rounds] for size in others])
    losses = np.log(rates[fastest][:rounds]) - logs
    degrees = len(others) * (rounds - 1)
    error = math.sqrt(losses.var(axis=1, ddof=1).mean() / rounds)
    half = float(stdtrit(degrees, (1 + LEVEL) / 2)) * error
    speed = f"{three_digits(statistics.median(rates[fastest]))} samples/s"
    for size, loss in sorted(zip(others, losses.mean(axis=1).tolist(), strict=True)):
        low, high = (100 * -math.expm1(-value) for value in (loss - half, loss + half))
        if size < fastest and high <= 100 * NEAR_BEST:
            return size, (
                f"{size:,} is at most {100 * NEAR_BEST:.0f}% slower than {fastest:,}, the fastest "
                f"({speed}): {100 * -math.expm1(-loss):.1f}% "
                f"[95% CI {low:.1f} to {high:.1f}], {rounds} runs each."
            )
    return fastest, (
        f"{fastest:,} is the fastest measured ({speed}, median of {rounds} runs); no smaller batch "
        f"is shown to be within {100 * NEAR_BEST:.0f}% of it."
    )


def sizes_to_measure(points: Sequence[Point], free: int) -> list[int]:
    """Return the largest sizes with headroom, each at most 0.6 of the next one; ascending."""
    chosen: list[int] = []
    for point in sorted(points, key=lambda point: -point.batch_size):
        if has_headroom(point, free) and (not chosen or point.batch_size <= chosen[-1] * 0.6):
            chosen.append(point.batch_size)
    return sorted(chosen[:MAX_SIZES])


def measure(
    config: RunConfig, sizes: Sequence[int], progress: Progress
) -> tuple[dict[int, list[float]], list[str]]:
    """Return samples/s by batch size and round, and why sizes are missing. Raises OSError."""
    job = {"config": config.to_dict(), "seed": config.seed, "steps": 0}
    job |= {"warmup": WARMUP_STEPS, "seconds": SECONDS}
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    missed: dict[int, str] = {}
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/"):
        if time.time() - left.lstat().st_mtime > MAX_AGE_S:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        process = TrialProcess("trainer.lab.trial_run", Path(name))
        rate: float | None = None
        for done in range(ROUNDS * len(sizes)):
            number, place = divmod(done, len(sizes))
            size = sizes[place]
            if size in missed:
                continue
            step_s = size * config.gradient_accumulation_steps / rate if rate else 0.0
            if number == 0 and step_s > MAX_STEP_S:
                missed[size] = f"{size:,}: not measured, a step would take about {step_s:.0f} s"
                continue
            text = f"Measuring batches of {size:,}, run {number + 1} of {ROUNDS}"
            progress(text, done / (ROUNDS * len(sizes)))
            answer = process.take({**job, "changes": {"batch_size": size}}, TIMEOUT_S)
            rate = (answer.get("metrics") or {}).get("samples_per_sec")
            if rate:
                rates[size].append(rate)
            else:
                missed[size] = f"{size:,}: {answer.get('reason') or 'no throughput was measured'}"
    return {size: found for size, found in rates.items() if size not in missed}, [*missed.values()]
