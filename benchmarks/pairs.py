"""Statistics of interleaved measurements: ratios to the bare blocks around, medians, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BARE, AGAIN = "bare", "bare_again"
RESAMPLES = 10_000


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the median with its 95 % bootstrap interval; None for both without values."""
    if not values:
        return {"median": None, "interval_95": None}
    rng = np.random.default_rng(0)
    resampled = np.median(rng.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975]).tolist()
    return {"median": float(np.median(values)), "interval_95": [low, high]}


def order(ways: Sequence[str], rounds: int, seed: int) -> list[str]:
    """Return the blocks of `rounds` rounds, a bare one at the end.

    A round is a bare block, half the ways, a block of the second bare process and the other half,
    the ways in a new order each time: none has always the same neighbor.
    """
    rng = np.random.default_rng(seed)
    blocks: list[str] = []
    for _ in range(rounds):
        shuffled = [ways[i] for i in rng.permutation(len(ways))]
        half = (len(shuffled) + 1) // 2
        blocks += [BARE, *shuffled[:half], AGAIN, *shuffled[half:]]
    return [*blocks, BARE]


def ratios(blocks: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    """Return each block's seconds over those of bare around it, by way, in order.

    Bare "there and then" is the line between the nearest bare blocks of either process before and
    after, so that a drift of the machine cancels. The second bare process is compared to the first
    alone. Blocks that do not lie between two bare ones are left out.
    """
    found: dict[str, list[float]] = {}
    for at, (way, seconds) in enumerate(blocks):
        if way == BARE:
            continue
        references = (BARE,) if way == AGAIN else (BARE, AGAIN)
        before = next((i for i in range(at - 1, -1, -1) if blocks[i][0] in references), None)
        after = next((i for i in range(at + 1, len(blocks)) if blocks[i][0] in references), None)
        if before is None or after is None:
            continue
        share = (at - before) / (after - before)
        bare = blocks[before][1] * (1 - share) + blocks[after][1] * share
        found.setdefault(way, []).append(seconds / bare)
    return found
