"""The phases of one rank's newest steps, as `detect.py` compares them. Pure.

A step lasts from one averaging of gradients to the next, where all ranks meet. Between these a rank
runs its optimizer, waits for a batch and computes forward and backward. The rank that takes longest
arrives last, and the others wait for it.
"""

from __future__ import annotations

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
"""What is read of a rank's steps."""
LATER = ("perf/forward_compute", "perf/backward_compute", "perf/comm_wait", "perf/ddp_iteration")
"""What DDP tells of a step in the row after it."""

MOST_PER_STEP, MOST_MODELS = 4096, 64  # Larger values were not written by us.


class StepPhase(StrEnum):
    """A part of a step; `OTHER` lies between the optimizer's step and the next batch."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    OTHER = "other"


OWN = (StepPhase.INPUT, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER, StepPhase.OTHER)
"""The phases in which a rank is busy by itself, in the order of `RankStepPhases.own`."""


@dataclass(frozen=True, slots=True, eq=False)
class RankStepPhases:
    """The steps of a rank whose waiting is known; seconds, NaN where a phase is not recorded.

    `steps` are their numbers (n,), rising: DDP's iterations where these are recorded. `wait` (n,)
    is the time in which the rank only waited for averaged gradients. `own` (5, n) has the phases of
    OWN. `timed` counts the steps with a step time. Gradients are averaged `per_step` times a step:
    `wait` is that of one of them so many times. `has_loader`: waiting for a batch is recorded.
    `models` are those in DDP; of more than one no waiting is known.
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
    """Return the phases of consecutive steps (n,), from the rows that hold them.

    The optimizer's step of the row before belongs to this step's wait, and what DDP knows of this
    step stands in the row after it. On a GPU forward is what the device took, where DDP says it.
    """
    found = {key: columns.get(key, np.full(len(steps), np.nan)) for key in KEYS}
    timed = np.flatnonzero((found[STEP_TIME] > 0) & np.isfinite(found[STEP_TIME]))
    steps, ts = steps[timed], ts[timed]
    found = {key: values[timed] for key, values in found.items()}
    follows = np.diff(steps) == 1
    before = np.where(np.append(False, follows), np.roll(found["perf/optimizer"], 1), np.nan)
    after = {
        key: np.where(np.append(follows, False), np.roll(found[key], -1), np.nan) for key in LATER
    }
    known, models = _known(after["perf/comm_wait"], found["perf/ddp_models"])
    # Iterations are the same on all ranks: one may count a step more, as of another model.
    iterations = after["perf/ddp_iteration"]
    numbers = iterations if np.isfinite(iterations[known]).any() else steps
    known = known[_rising(numbers[known])]
    per_step = _per_step(steps[known], numbers[known])
    after |= {key: after[key] * per_step for key in ("perf/backward_compute", "perf/comm_wait")}
    own = _own(found, before, after, per_step, on_gpu=on_gpu)
    return RankStepPhases(
        rank=rank,
        steps=numbers[known],
        ts=ts[known],
        step_time=found[STEP_TIME][known],
        wait=after["perf/comm_wait"][known],
        own=own[:, known],
        timed=len(timed),
        per_step=per_step,
        has_loader=bool(np.isfinite(found["perf/data_wait"]).any()),
        models=models,
    )


def _known(wait: Floats, models: Floats) -> tuple[NDArray[np.intp], int]:
    """Return the places of the steps whose waiting is known, and the models in DDP by now."""
    known = np.flatnonzero(np.isfinite(wait) & (wait >= 0))
    several = np.flatnonzero((models > 1) & (models <= MOST_MODELS))
    if len(several) and (not len(known) or several[-1] > known[-1] + 1):
        return known[:0], int(models[several[-1]])
    return known, 1


def _rising(numbers: Floats) -> slice:
    """Return where numbers rise up to the end: after the last model that was made, or resumed."""
    falls = np.flatnonzero(~(np.diff(numbers) > 0))
    return slice(int(falls[-1]) + 1 if len(falls) else 0, None)


def _per_step(steps: Floats, numbers: Floats) -> int:
    """Return how many of DDP's iterations a step has: the median over quarters of the steps.

    A validation that goes through DDP with gradients counts in one place only.
    """
    apart = max(1, len(steps) // 4)
    passed = steps[apart:] - steps[:-apart]
    found = (numbers[apart:] - numbers[:-apart])[passed > 0] / passed[passed > 0]
    usual = float(np.median(found)) if len(found) else 1.0
    return round(usual) if 1 <= usual <= MOST_PER_STEP else 1


def _own(
    found: Mapping[str, Floats],
    optimizer: Floats,
    after: Mapping[str, Floats],
    per_step: int,
    *,
    on_gpu: bool,
) -> Floats:
    """Return the phases of OWN (5, n)."""
    wait, forward = found["perf/data_wait"], found["perf/forward"]
    inside, backward = after["perf/forward_compute"], after["perf/backward_compute"]
    # Without a DataLoader the script makes its batch before it calls the model.
    made = np.where(np.isnan(wait), np.maximum(forward - inside, 0), wait)
    computed = np.where(np.isnan(wait) | np.isnan(forward), inside, forward)
    if on_gpu:
        computed = np.where(np.isnan(inside), computed, inside)
    elif per_step == 1:
        # DDP knows the last batch of a step; without averaging, the others wait for nobody.
        whole = np.maximum(found["perf/backward"] - after["perf/comm_wait"], 0)
        backward = np.where(np.isnan(whole), backward, whole)
    ours = np.nan_to_num(found["perf/backward"]) + np.nan_to_num(found["perf/optimizer"])
    theirs = np.nan_to_num(after["perf/backward_compute"]) + np.nan_to_num(after["perf/comm_wait"])
    is_seen = np.isfinite(forward)  # else the script only says when a step ends
    busy = np.where(is_seen, np.nan_to_num(forward) + ours, np.nan_to_num(inside) + theirs)
    other = np.maximum(found[STEP_TIME] - np.nan_to_num(wait) - busy, 0)
    return np.array([made, computed, backward, optimizer, other])


PERMUTATIONS, FEWER, MANY = 1999, 499, 8
"""For up to MANY ranks, and for more: 64 take some 20 ms then."""
BLOCKS = 10  # Parts of the window whose steps are alike.
EXPLAINED = 0.8  # Least part of the lateness that a phase explains.
TRIM = 0.05  # Part of the steps left out at either end: a checkpoint is no straggler.


def lateness(late: Floats) -> Floats:
    """Return each rank's mean lateness (ranks,) less what is usual among the others.

    `late` is (ranks, steps or blocks), in seconds.
    """
    means = np.array([trimmed(row) for row in late])
    return np.asarray(means - np.maximum(others(means[:, None])[:, 0], 0))


def chance(late: Floats) -> float:
    """Return how often permuted ranks have a latest one as late as the latest here, or later.

    Without a slow rank all are exchangeable: within a block of steps any could have had the times
    of any other. `late` is (ranks, steps).
    """
    blocks = np.array([[trimmed(part) for part in np.array_split(r, BLOCKS)] for r in late])
    # In an order of its own, so that the numbers of the ranks change nothing.
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
    """Return the phases to name for a lateness, the longest first; () where they do not explain it.

    All phases together explain EXPLAINED of the lateness. Those named explain half of it, and each
    that takes half as long as the first is among them.
    """
    longer = sorted(((value, name) for name, value in excess.items() if value > 0), reverse=True)
    if not longer or sum(value for value, _ in longer) < EXPLAINED * late:
        return ()
    named: list[StepPhase] = []
    so_far = 0.0
    for value, name in longer:
        if so_far >= late / 2 and value < longer[0][0] / 2:
            break
        named.append(StepPhase(name))
        so_far += value
    return tuple(named)


def others(values: Floats) -> Floats:
    """Return, for each rank, the median of the others' values (ranks, steps)."""
    ordered, half = np.sort(values, axis=0), len(values) // 2
    if len(values) % 2 == 0:  # leaves one of the two in the middle
        middle = np.where(values <= ordered[half - 1], ordered[half], ordered[half - 1])
        return np.asarray(middle)
    below, middle, above = ordered[half - 1], ordered[half], ordered[(half + 1) % len(values)]
    first = np.where(values > middle, below, np.where(values < middle, middle, below))
    second = np.where(values > middle, middle, above)
    return np.asarray((first + second) / 2)


def late_steps(wait: Floats) -> Floats:
    """Return the share of the steps in which each rank is among the late.

    In each step the ranks are in two groups, by whether they wait less or more than half of what
    the one that waits longest does. `wait` is (ranks, steps).
    """
    least, most = wait.min(axis=0), wait.max(axis=0)
    return np.asarray((wait - least < (most - least) / 2).mean(axis=1))


def trimmed(values: Floats) -> float:
    """Return the mean without the lowest and highest TRIM; NaN among them are left out."""
    finite = np.sort(values[np.isfinite(values)])
    cut = math.ceil(TRIM * len(finite)) if len(finite) > 2 else 0
    kept = finite[cut : len(finite) - cut]
    return float(kept.mean()) if len(kept) else 0.0
