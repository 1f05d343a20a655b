"""The margin that a prediction is given: how far earlier runs went above theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_FACTOR = 1.10
"""Before anything was learned: kernels' own memory, which is not predicted, is a few percent."""
SHARE = 0.95
"""Of the runs, which the margin is to cover."""
ENOUGH_RUNS = 3
ABOVE = 0.02
"""Added to what was seen: the next run is another one."""
LEAST_RATIO, MOST_RATIO = 0.1, 10.0
"""A ratio outside says that the run was not what was predicted: of other code, or reset peaks."""


@dataclass(frozen=True, slots=True)
class Margin:
    """The factor for a prediction, and the earlier runs that it comes from."""

    factor: float
    runs: int
    source: str

    def text(self) -> str:
        """Say where the factor comes from."""
        percent = f"{100 * (self.factor - 1):.0f} %"
        if self.source == "default":
            known = f"{self.runs} earlier run{'s' if self.runs != 1 else ''}"
            return f"{percent}, the default ({known} to learn from, {ENOUGH_RUNS} needed)"
        return f"{percent}, learned from {self.runs} earlier runs"


DEFAULT = Margin(DEFAULT_FACTOR, 0, "default")


def learned(ratios: Sequence[float]) -> Margin:
    """Return the margin from measured / predicted of earlier runs; of few runs the default.

    The ratio that 95 % of the runs do not exceed, at least 1, and 2 % more.
    """
    sane = sorted(ratio for ratio in ratios if LEAST_RATIO <= ratio <= MOST_RATIO)
    if len(sane) < ENOUGH_RUNS:
        return Margin(DEFAULT_FACTOR, len(sane), "default")
    place = min(len(sane) - 1, math.ceil(SHARE * len(sane)) - 1)
    return Margin(max(1.0, sane[place]) + ABOVE, len(sane), "learned")
