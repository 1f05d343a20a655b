"""Measures throughput at a few batch sizes, by trials of the lab.

Only sizes that are predicted to leave headroom are measured, so that none runs out of memory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.lab.trial_process import TrialProcess
from trainer.config import RunConfig
from trainer.memory_estimate.batch_size_finder import Point, has_headroom

WARMUP_STEPS, SECONDS = 3, 1.5
ROUNDS = 3
"""Runs of each size. A round has each size once, so that drift affects all sizes alike."""
MAX_SIZES = 5
MAX_STEP_S = 4.0  # Sizes with a longer step, extrapolated from the size before, are skipped.
TIMEOUT_S = 60.0

PREFIX = "stepscope-batch-"
MAX_AGE_S = 3600.0  # Older temporary folders are those of killed processes.

Progress = Callable[[str, float], None]  # Called with the current activity and the fraction done.


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
    """Return samples/s by batch size and round, and the reasons of missing sizes.

    Raises OSError if no temporary folder can be created.
    """
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
