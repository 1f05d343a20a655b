"""Read the newest steps of a job's ranks from their stores, for `detect.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepscope.bottleneck.classify import BUSY_HOST
from stepscope.bottleneck.step_window import FIRST_STEPS, WINDOW_S, recent_figures, setup_of
from stepscope.distributed.stragglers.detect import MIN_STEPS, StragglerVerdict, judge
from stepscope.distributed.stragglers.step_phases import KEYS, RankStepPhases, rank_times
from stepscope.metrics import Stream
from stepscope.run import RunInfo, run_json_of
from stepscope.run.rank_info import rank_numbers, torch_rank
from stepscope.store import SeriesBlock, StoreError, StoreReader, store_name

log = logging.getLogger(__name__)

ROWS = 512  # Number of newest steps read first: sufficient if every fourth step is sampled.
MOST_ROWS = 8192  # Maximum number, if samples are rare: 16 frames, read in some 10 ms.


def in_job(run_json: Mapping[str, Any]) -> bool:
    """Return True if a process is a rank of a job of several ranks."""
    size = run_json.get("world_size")
    return type(size) is int and size > 1


def judged_run(run: RunInfo) -> StragglerVerdict | None:
    """Return the verdict on a job by its readable stores (2 ms a rank); None for one process."""
    times, host_cpu = [], None
    for number in rank_numbers(run.folder):
        own = run_json_of(run, number)
        if not (run.folder / store_name(number)).is_file():
            continue
        try:
            with StoreReader(run.folder, number) as reader:
                times.append(recent_times(reader, number, own))
                if number == 0:
                    host_cpu = recent_figures(reader, own).host_cpu
        except StoreError as error:
            log.warning("%s, rank %d is skipped: %s", run.id, number, error)
    return judged_ranks(times, run.run_json, host_cpu)


def judged_ranks(
    times: Sequence[RankStepPhases], run_json: Mapping[str, Any], host_cpu: float | None
) -> StragglerVerdict | None:
    """Return a job's verdict; None for one process or simulated GPUs. `host_cpu` is 0 to 1."""
    if not in_job(run_json) or setup_of(run_json).simulated:
        return None
    busy = (host_cpu or 0.0) >= BUSY_HOST
    return judge(times, world_size=run_json["world_size"], busy_host=busy)


def recent_times(reader: StoreReader, number: int, run_json: Mapping[str, Any]) -> RankStepPhases:
    """Return the phases of the newest steps of a folder rank, of the last 30 s if sufficient.

    Raises StoreError.
    """
    rank = torch_rank(run_json, number)
    infos = {(info.stream, info.source): info for info in reader.series()}
    info = infos.get((Stream.STEPS.value, ""))
    on_gpu = setup_of(run_json).on_gpu
    if info is None:
        return _times(SeriesBlock.from_rows([]), rank, on_gpu)
    rows = ROWS
    while True:
        first = min(info.rows, max(FIRST_STEPS, info.rows - rows))
        times = _times(reader.read(info.id, first, info.rows, 1), rank, on_gpu)
        if len(times.steps) >= 2 * MIN_STEPS or first == FIRST_STEPS or rows >= MOST_ROWS:
            break
        rows *= 4
    return _newest(times)


def _newest(times: RankStepPhases) -> RankStepPhases:
    """Return the steps of the last WINDOW_S, and at least twice MIN_STEPS."""
    if not len(times.steps):
        return times
    count = int(np.count_nonzero(times.ts > times.ts[-1] - WINDOW_S))
    kept = slice(-max(2 * MIN_STEPS, count), None)
    columns = ("steps", "ts", "step_time", "wait")
    newest = {name: getattr(times, name)[kept] for name in columns}
    return replace(times, own=times.own[:, kept], **newest)


def _times(block: SeriesBlock, rank: int, on_gpu: bool) -> RankStepPhases:
    columns = {key: block.mean[block.keys.index(key)] for key in KEYS if key in block.keys}
    return rank_times(rank, block.step, block.ts, columns, on_gpu=on_gpu)
