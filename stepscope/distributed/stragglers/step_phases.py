"""The phases of one rank's newest steps, which `detect.py` compares.

A step lasts from one gradient all-reduce to the next, where all ranks synchronize. The rank whose
optimizer, input, forward and backward take longest arrives last, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from stepscope.common.metrics import Stream
from stepscope.run.rank_info import torch_rank
from stepscope.run_setup import setup_of
from stepscope.store import StoreReader
from stepscope.store.blocks import Floats

MIN_STEPS = 20  # Minimum number of common steps.
FIRST_STEPS = 5  # Number of excluded first steps: kernels load, caches and the allocator fill.
ROWS = 512  # Number of newest steps read first: sufficient if every fourth step is sampled.
MAX_ROWS = 8192  # If samples are rare: 16 frames, read in some 10 ms.

LATER = ("perf/forward_compute", "perf/backward_compute", "perf/comm_wait", "perf/ddp_iteration")
"""DDP's metrics of a step, recorded in the row after it."""
KEYS = (
    "perf/step_time",
    "perf/data_wait",
    "perf/forward",
    "perf/backward",
    "perf/optimizer",
    *LATER,
)


class StepPhase(StrEnum):
    """Phase of a step; OTHER is between the optimizer's step and the next batch."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    OTHER = "other"


OWN = (StepPhase.INPUT, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER, StepPhase.OTHER)
"""Phases in which a rank does not wait for others, in the order of `RankStepPhases.own`."""


@dataclass(frozen=True, slots=True, eq=False)
class RankStepPhases:
    """The steps of a rank with a known wait; seconds, NaN if a phase is not recorded.

    `steps` are rising numbers (n,): DDP's iterations if recorded. `wait` (n,) is the exposed time
    of the gradient all-reduce. `own` (5, n) has the phases of OWN. `timed` counts the steps with a
    step time.
    """

    rank: int
    steps: Floats
    ts: Floats
    step_time: Floats
    wait: Floats
    own: Floats
    timed: int = 0


def recent_times(reader: StoreReader, number: int, run_json: Mapping[str, Any]) -> RankStepPhases:
    """Return the phases of the newest steps of a folder rank. Raises StoreError."""
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
    return times


def rank_times(
    rank: int, steps: Floats, ts: Floats, columns: Mapping[str, Floats], *, on_gpu: bool = False
) -> RankStepPhases:
    """Return the phases of consecutive steps (n,) from their rows.

    The optimizer's step is in the row before, and DDP's metrics are in the row after it. On a GPU
    forward and backward are DDP's times on the device, if recorded.
    """
    row = {key: columns.get(key, np.full(len(steps), np.nan)) for key in KEYS}
    timed = np.flatnonzero((row["perf/step_time"] > 0) & np.isfinite(row["perf/step_time"]))
    steps = steps[timed]
    row = {key: values[timed] for key, values in row.items()}
    follows = np.diff(steps) == 1
    optimizer = np.where(np.append(False, follows), np.roll(row["perf/optimizer"], 1), np.nan)
    for key in LATER:
        row[key] = np.where(np.append(follows, False), np.roll(row[key], -1), np.nan)
    wait = row["perf/comm_wait"]
    known = np.flatnonzero(np.isfinite(wait) & (wait >= 0))
    # Iterations are equal on all ranks, while one may count an additional step.
    has_iterations = np.isfinite(row["perf/ddp_iteration"][known]).any()
    numbers = row["perf/ddp_iteration"] if has_iterations else steps
    falls = np.flatnonzero(~(np.diff(numbers[known]) > 0))
    if len(falls):
        known = known[falls[-1] + 1 :]  # after the last new or resumed model
    return RankStepPhases(
        rank=rank,
        steps=numbers[known],
        ts=ts[timed][known],
        step_time=row["perf/step_time"][known],
        wait=wait[known],
        own=_own(row, optimizer, on_gpu=on_gpu)[:, known],
        timed=len(timed),
    )


def _own(row: Mapping[str, Floats], optimizer: Floats, *, on_gpu: bool) -> Floats:
    """Return the phases of OWN (5, n)."""
    data_wait, forward = row["perf/data_wait"], row["perf/forward"]
    device_forward, device_backward = row["perf/forward_compute"], row["perf/backward_compute"]
    # Without a DataLoader the script makes its batch before it calls the model.
    has_loader = np.isfinite(data_wait)
    made = np.where(has_loader, data_wait, np.maximum(forward - device_forward, 0))
    computed = np.where(has_loader & np.isfinite(forward), forward, device_forward)
    backward = device_backward
    if on_gpu:
        computed = np.where(np.isnan(device_forward), computed, device_forward)
    else:
        # DDP times the last batch of a step; batches before it have no all-reduce.
        all_batches = np.maximum(row["perf/backward"] - row["perf/comm_wait"], 0)
        backward = np.where(np.isnan(all_batches), backward, all_batches)
    # Without a time of forward, the phases are DDP's.
    recorded = np.where(
        np.isfinite(forward),
        (forward, row["perf/backward"], row["perf/optimizer"]),
        (device_forward, device_backward, row["perf/comm_wait"]),
    )
    busy = np.nan_to_num(data_wait) + np.nan_to_num(recorded).sum(axis=0)
    other = np.maximum(row["perf/step_time"] - busy, 0)
    return np.array([made, computed, backward, optimizer, other])
