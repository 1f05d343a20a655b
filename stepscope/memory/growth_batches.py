"""Does memory grow because batches get longer? A judgement on floors and peaks. Pure."""

from __future__ import annotations

import numpy as np

from stepscope.store.blocks import Floats

LONGER = 0.5
"""Growth of what steps take for a time, in terms of the floor's, from which batches get longer."""


def batches_grow(steps: Floats, floors: Floats, peaks: Floats) -> bool:
    """Say whether what steps take for a time grows with the floor, as where batches get longer.

    The last batch is still there at a boundary, so longer ones raise the floor as well. What is
    kept from step to step raises floor and peak alike: then their distance stays as it was. It has
    to grow in both halves: a single large step is no sign.
    """
    above = peaks - floors
    quarters = np.array_split(np.arange(len(steps)), 4)
    rises = [
        (
            np.median(values[quarters[1]]) - np.median(values[quarters[0]]),
            np.median(values[quarters[3]]) - np.median(values[quarters[2]]),
        )
        for values in (above, floors)
    ]
    return all(more > LONGER * floor for more, floor in zip(*rises, strict=True))
