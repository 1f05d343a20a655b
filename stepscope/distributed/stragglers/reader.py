"""Read the newest steps of a job's ranks from their stores, for `detect.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepscope.common.metrics import Stream
from stepscope.distributed.stragglers.detect import MIN_STEPS, StragglerFinding, find_straggler
from stepscope.distributed.stragglers.step_phases import KEYS, RankStepPhases, rank_times
from stepscope.run.rank_info import torch_rank
from stepscope.run_setup import setup_of
from stepscope.store import StoreReader

BUSY_HOST = 0.9  # Minimum utilization of all cores at which a process waits for a core.
FIRST_STEPS = 5  # Number of excluded first steps: kernels load, caches and the allocator fill.
WINDOW_S = 30.0  # Maximum age of the compared steps.
ROWS = 512  # Number of newest steps read first: sufficient if every fourth step is sampled.
MAX_ROWS = 8192  # If samples are rare: 16 frames, read in some 10 ms.


def in_job(run_json: Mapping[str, Any]) -> bool:
    """Return True if a process is a rank of a job of several ranks."""
    return (run_json.get("world_size") or 1) > 1


def straggler_among(
    times: Sequence[RankStepPhases], run_json: Mapping[str, Any], host_cpu: float | None
) -> StragglerFinding | None:
    """Return a job's finding; None for one process or simulated GPUs. `host_cpu` is 0 to 1."""
    if not in_job(run_json) or setup_of(run_json).simulated:
        return None
    is_busy = (host_cpu or 0.0) >= BUSY_HOST
    return find_straggler(times, world_size=run_json["world_size"], busy_host=is_busy)


def recent_times(reader: StoreReader, number: int, run_json: Mapping[str, Any]) -> RankStepPhases:
    """Return the phases of the steps of the last WINDOW_S of a folder rank.

    Returns at least 2 * MIN_STEPS if so many are sampled. Raises StoreError.
    """
    rank, on_gpu = torch_rank(run_json, number), setup_of(run_json).on_gpu
    infos = [info for info in reader.series() if info.stream == Stream.STEPS.value]
    if not infos:
        return rank_times(rank, np.empty(0), np.empty(0), {})
    info = infos[0]
    for rows in (ROWS, MAX_ROWS):
        first = min(info.rows, max(FIRST_STEPS, info.rows - rows))
        block = reader.read(info.id, first, info.rows, 1)
        columns = {key: block.mean[block.keys.index(key)] for key in KEYS if key in block.keys}
        times = rank_times(rank, block.step, block.ts, columns, on_gpu=on_gpu)
        if len(times.steps) >= 2 * MIN_STEPS:
            break
    count = int(np.count_nonzero(times.ts > times.ts[-1:] - WINDOW_S))
    kept = slice(-max(2 * MIN_STEPS, count), None)
    return replace(
        times,
        steps=times.steps[kept],
        ts=times.ts[kept],
        step_time=times.step_time[kept],
        wait=times.wait[kept],
        own=times.own[:, kept],
    )
