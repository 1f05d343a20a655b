"""How late each rank of a job is, whether it may be chance, and in which phase. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from stepscope.distributed.stragglers.step_phases import Phase
from stepscope.store.blocks import Floats

PERMUTATIONS, FEWER = 1999, 499
"""For up to MANY ranks, and for more: 64 take some 20 ms then."""
MANY = 8
BLOCKS = 10
"""Parts of the window whose steps are alike."""
EXPLAINED = 0.8
"""Least part of the lateness that a phase explains."""
TRIM = 0.05
"""Part of the steps left out at either end: a checkpoint is no straggler."""


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
    # One long pause would drown what all other blocks say. The bound is the same however the ranks
    # are permuted: if one is late in all blocks, its values are the highest.
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


def explained(excess: Mapping[str, float], late: float) -> tuple[Phase, ...]:
    """Return the phases to name for a lateness, the longest first; () where they do not explain it.

    All phases together explain EXPLAINED of the lateness. Those named explain half of it, and each
    that takes half as long as the first is among them.
    """
    longer = sorted(((value, name) for name, value in excess.items() if value > 0), reverse=True)
    if not longer or sum(value for value, _ in longer) < EXPLAINED * late:
        return ()
    named: list[Phase] = []
    so_far = 0.0
    for value, name in longer:
        if so_far >= late / 2 and value < longer[0][0] / 2:
            break
        named.append(Phase(name))
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
