"""Measures throughput at a few batch sizes that are predicted to fit, each in a fresh process.

A sample is one of the lab's: an ordinary short run with recorder and sampler. No size is measured
that is not predicted to leave headroom, so that none runs out of memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stepscope.common.files import try_lock
from trainer.config import RunConfig
from trainer.lab.trial_process import SampleProcess
from trainer.memory_estimate.batch_size_finder import HEADROOM, Point

WARMUP_STEPS, SECONDS = 3, 1.5
MOST_SAMPLES = 6
LONGEST_STEP_S = 4.0
"""A size whose step would take longer, judged by the last rate, is left out."""
TIMEOUT_S = 60.0
PREFIX = ".fit-"
LOCK = "lock"
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # NFS locks no directory
LEFT_S = 60.0
"""Age from which a folder that nobody holds was left behind by a process that was killed."""

Say = Callable[[str, float], None]
"""Takes what is done now, and the share that is done."""


def sizes_to_measure(points: Sequence[Point], room: int, known: Sequence[int]) -> list[int]:
    """Return the largest sizes that leave headroom, each about half of the one above; ascending.

    Sizes whose throughput is known are left out.
    """
    fitting = sorted(
        (point.batch_size for point in points if point.needed <= room * (1 - HEADROOM)),
        reverse=True,
    )
    chosen: list[int] = []
    for size in fitting:
        if not chosen or size <= chosen[-1] * 0.6:
            chosen.append(size)
    return sorted(size for size in chosen[:MOST_SAMPLES] if size not in known)


def measure(
    config: RunConfig,
    sizes: Sequence[int],
    root: Path,
    say: Say,
    started: Callable[[SampleProcess], None] = lambda taker: None,
) -> tuple[dict[int, float], list[str]]:
    """Return samples per second by batch size, and a sentence for each size without.

    The runs lie in a folder below `root`, the folder of all runs, while they last. Raises
    OSError where no folder can be made.
    """
    rates: dict[int, float] = {}
    missed: list[str] = []
    with _folder(root) as folder:
        taker = SampleProcess(folder)
        started(taker)
        rate: float | None = None
        for done, size in enumerate(sizes):
            if taker.stopping:
                break
            if rate is not None and size * config.accumulation / rate > LONGEST_STEP_S:
                seconds = size * config.accumulation / rate
                missed.append(f"{size:,}: not measured, a step would take about {seconds:.0f} s")
                continue
            say(f"Measuring batches of {size:,}", done / len(sizes))
            answer = taker.take(_job(config, size), TIMEOUT_S)
            metrics = answer.get("metrics")
            if isinstance(metrics, dict) and (metrics.get("samples_per_sec") or 0) > 0:
                rate = rates[size] = float(metrics["samples_per_sec"])
            else:
                missed.append(f"{size:,}: {answer.get('reason') or 'no rate was measured'}")
    return rates, missed


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    """Make a folder that is held while it is used; those that were left behind are removed."""
    root.mkdir(parents=True, exist_ok=True)
    remove_left(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=root) as name:
        number = os.open(Path(name, LOCK), LOCK_FLAGS, 0o600)
        try:
            try_lock(number)
            yield Path(name)
        finally:
            os.close(number)


def remove_left(root: Path) -> None:
    """Remove the folders of probes that were killed: old ones that no process holds."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone, or another's
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or time.time() - status.st_mtime < LEFT_S:
                continue
            number = os.open(folder / LOCK, LOCK_FLAGS, 0o600)
            try:
                if try_lock(number):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(number)


def _job(config: RunConfig, size: int) -> dict[str, object]:
    return {
        "config": config.to_dict(),
        "changes": {"batch_size": size},
        "seed": config.seed,
        "warmup": WARMUP_STEPS,
        "steps": 0,
        "seconds": SECONDS,
    }
