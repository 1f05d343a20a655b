"""The phases of one rank's newest steps, which `detect.py` compares. Pure; no I/O.

A step lasts from one gradient all-reduce to the next, where all ranks synchronize. The rank whose
optimizer, input, forward and backward take longest arrives last, and the others wait for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from stepscope.store.blocks import Floats

STEP_TIME = "perf/step_time"
KEYS = (
    STEP_TIME,
    "perf/data_wait",
    "perf/forward",
    "perf/backward",
    "perf/optimizer",
    "perf/forward_compute",
    "perf/backward_compute",
    "perf/comm_wait",
    "perf/ddp_iteration",
    "perf/ddp_models",
)
LATER = ("perf/forward_compute", "perf/backward_compute", "perf/comm_wait", "perf/ddp_iteration")
"""DDP's metrics of a step, recorded in the row after it."""

MOST_PER_STEP, MOST_MODELS = 4096, 64  # Larger values in a store are invalid.


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
    step time. Gradients are reduced `per_step` times per step: `wait` is that of one of these times
    `per_step`. `has_loader`: the wait for a batch is recorded. `models` is the number of models in
    DDP; the wait is unknown for more than one.
    """

    rank: int
    steps: Floats
    ts: Floats
    step_time: Floats
    wait: Floats
    own: Floats
    timed: int = 0
    per_step: int = 1
    has_loader: bool = True
    models: int = 1


def rank_times(
    rank: int, steps: Floats, ts: Floats, columns: Mapping[str, Floats], *, on_gpu: bool = False
) -> RankStepPhases:
    """Return the phases of consecutive steps (n,) from their rows.

    The optimizer's step is in the row before, and DDP's metrics are in the row after it. On a GPU
    forward is DDP's time on the device, if recorded.
    """
    row = {key: columns.get(key, np.full(len(steps), np.nan)) for key in KEYS}
    timed = np.flatnonzero((row[STEP_TIME] > 0) & np.isfinite(row[STEP_TIME]))
    steps, ts = steps[timed], ts[timed]
    row = {key: values[timed] for key, values in row.items()}
    follows = np.diff(steps) == 1
    before = np.where(np.append(False, follows), np.roll(row["perf/optimizer"], 1), np.nan)
    after = {
        key: np.where(np.append(follows, False), np.roll(row[key], -1), np.nan) for key in LATER
    }
    known, models = _known(after["perf/comm_wait"], row["perf/ddp_models"])
    # Iterations are equal on all ranks, while one may count an additional step.
    iterations = after["perf/ddp_iteration"]
    numbers = iterations if np.isfinite(iterations[known]).any() else steps
    known = known[_rising(numbers[known])]
    per_step = _per_step(steps[known], numbers[known])
    after |= {key: after[key] * per_step for key in ("perf/backward_compute", "perf/comm_wait")}
    own = _own(row, before, after, per_step, on_gpu=on_gpu)
    return RankStepPhases(
        rank=rank,
        steps=numbers[known],
        ts=ts[known],
        step_time=row[STEP_TIME][known],
        wait=after["perf/comm_wait"][known],
        own=own[:, known],
        timed=len(timed),
        per_step=per_step,
        has_loader=bool(np.isfinite(row["perf/data_wait"]).any()),
        models=models,
    )


def _known(wait: Floats, models: Floats) -> tuple[NDArray[np.intp], int]:
    """Return the indices of the steps with a known wait, and the number of models in DDP."""
    known = np.flatnonzero(np.isfinite(wait) & (wait >= 0))
    several = np.flatnonzero((models > 1) & (models <= MOST_MODELS))
    if len(several) and (not len(known) or several[-1] > known[-1] + 1):
        return known[:0], int(models[several[-1]])
    return known, 1


def _rising(numbers: Floats) -> slice:
    """Return the rising numbers up to the end: after the last new or resumed model."""
    falls = np.flatnonzero(~(np.diff(numbers) > 0))
    return slice(int(falls[-1]) + 1 if len(falls) else 0, None)


def _per_step(steps: Floats, numbers: Floats) -> int:
    """Return DDP's iterations per step: the median of quarters, as a validation changes one."""
    apart = max(1, len(steps) // 4)
    passed = steps[apart:] - steps[:-apart]
    ratios = (numbers[apart:] - numbers[:-apart])[passed > 0] / passed[passed > 0]
    usual = float(np.median(ratios)) if len(ratios) else 1.0
    return round(usual) if 1 <= usual <= MOST_PER_STEP else 1


def _own(
    row: Mapping[str, Floats],
    optimizer: Floats,
    after: Mapping[str, Floats],
    per_step: int,
    *,
    on_gpu: bool,
) -> Floats:
    """Return the phases of OWN (5, n)."""
    wait, forward = row["perf/data_wait"], row["perf/forward"]
    inside, backward = after["perf/forward_compute"], after["perf/backward_compute"]
    # Without a DataLoader the script makes its batch before it calls the model.
    made = np.where(np.isnan(wait), np.maximum(forward - inside, 0), wait)
    computed = np.where(np.isnan(wait) | np.isnan(forward), inside, forward)
    if on_gpu:
        computed = np.where(np.isnan(inside), computed, inside)
    elif per_step == 1:
        # DDP times the last batch of a step; batches before it have no all-reduce.
        whole = np.maximum(row["perf/backward"] - after["perf/comm_wait"], 0)
        backward = np.where(np.isnan(whole), backward, whole)
    # Without a time of forward, the phases are DDP's.
    parts = np.where(
        np.isfinite(forward),
        (forward, row["perf/backward"], row["perf/optimizer"]),
        (inside, after["perf/backward_compute"], after["perf/comm_wait"]),
    )
    busy = np.nan_to_num(parts).sum(axis=0)
    other = np.maximum(row[STEP_TIME] - np.nan_to_num(wait) - busy, 0)
    return np.array([made, computed, backward, optimizer, other])


PERMUTATIONS, FEWER, MANY = 1999, 499, 8  # For up to MANY ranks, and for more: 64 take 20 ms.
BLOCKS = 10  # Number of parts of the window.
EXPLAINED = 0.8  # Minimum fraction of the lateness that the phases explain.
TRIM = 0.05  # Fraction of the steps excluded at either end: a checkpoint is no straggler.


def lateness(late: Floats) -> Floats:
    """Return each rank's mean lateness (ranks,) less the median of the others', if positive.

    `late` is (ranks, steps or blocks), in seconds.
    """
    means = np.array([trimmed(row) for row in late])
    return np.asarray(means - np.maximum(others(means[:, None])[:, 0], 0))


def chance(late: Floats) -> float:
    """Return the permutation-test p-value of the largest mean lateness.

    Null hypothesis: ranks are exchangeable within each block. `late` is (ranks, steps) in seconds.
    """
    blocks = np.array([[trimmed(part) for part in np.array_split(r, BLOCKS)] for r in late])
    # Sorted, so that the result does not depend on the order of the ranks.
    blocks = blocks[np.argsort(blocks.sum(axis=1))]
    # One long pause would outweigh all other blocks. Permuting ranks does not change the bound.
    bound = 2 * max(0.0, float(np.median(np.sort(blocks, axis=None)[-BLOCKS:])))
    blocks = np.clip(blocks, -bound, bound)
    seen = float(_latest(blocks[None])[0])
    rng = np.random.default_rng(0)
    count = PERMUTATIONS if len(blocks) <= MANY else FEWER
    order = rng.random((count, *blocks.shape)).argsort(axis=1)
    permuted = np.take_along_axis(blocks[None], order, axis=1)
    as_late = np.count_nonzero(_latest(permuted) >= seen * (1 - 1e-9))
    return float(as_late + 1) / (count + 1)


def _latest(blocks: Floats) -> Floats:
    """Return the lateness of the latest rank of each permutation (p, ranks, blocks)."""
    means = blocks.mean(axis=2)
    return np.asarray((means - np.maximum(np.median(means, axis=1, keepdims=True), 0)).max(axis=1))


def explained(excess: Mapping[str, float], late: float) -> tuple[StepPhase, ...]:
    """Return the phases to name for a lateness, the longest first; () if they do not explain it.

    All phases explain EXPLAINED of it; the named ones half of it, or are half as long as the first.
    """
    longer = sorted(((value, name) for name, value in excess.items() if value > 0), reverse=True)
    if not longer or sum(value for value, _ in longer) < EXPLAINED * late:
        return ()
    so_far = itertools.accumulate((value for value, _ in longer), initial=0.0)
    return tuple(
        StepPhase(name)
        for (value, name), before in zip(longer, so_far, strict=False)
        if before < late / 2 or value >= longer[0][0] / 2
    )


def others(values: Floats) -> Floats:
    """Return, for each rank, the median of the others' values (ranks, steps)."""
    ordered, half = np.sort(values, axis=0), len(values) // 2
    if len(values) % 2 == 0:  # the others have one value in the middle
        middle = np.where(values <= ordered[half - 1], ordered[half], ordered[half - 1])
        return np.asarray(middle)
    below, middle, above = ordered[half - 1], ordered[half], ordered[(half + 1) % len(values)]
    first = np.where(values > middle, below, np.where(values < middle, middle, below))
    second = np.where(values > middle, middle, above)
    return np.asarray((first + second) / 2)


def late_steps(wait: Floats) -> Floats:
    """Return the fraction of steps in which a rank's `wait` (ranks, steps) is below mid-range."""
    least, most = wait.min(axis=0), wait.max(axis=0)
    return np.asarray((wait - least < (most - least) / 2).mean(axis=1))


def trimmed(values: Floats) -> float:
    """Return the mean of the finite values without the lowest and highest TRIM."""
    finite = np.sort(values[np.isfinite(values)])
    cut = math.ceil(TRIM * len(finite)) if len(finite) > 2 else 0
    kept = finite[cut : len(finite) - cut]
    return float(kept.mean()) if len(kept) else 0.0
