"""Blocks of the store from rows as literals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stepscope.store import SeriesBlock
from stepscope.store.blocks import RECORDED_NAN


def block_of_rows(rows: Sequence[tuple[float, int, Mapping[str, float | None]]]) -> SeriesBlock:
    """Return rows (time, step, values) as a block; an absent value, or None, is missing."""
    keys = tuple(dict.fromkeys(key for _, _, values in rows for key in values))
    table = np.full((len(keys), len(rows)), np.nan)
    for column, (_, _, values) in enumerate(rows):
        for line, key in enumerate(keys):
            value = values.get(key)
            if value is not None:
                table[line, column] = RECORDED_NAN if value != value else value
    ts = np.array([row[0] for row in rows], dtype=float)
    step = np.array([row[1] for row in rows], dtype=float)
    return SeriesBlock.raw(keys, ts, step, table)
