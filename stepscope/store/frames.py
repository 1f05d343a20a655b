"""Blocks of a series: rows or rolled-up buckets, and their bytes on disk.

A *row* is one logged step or one sampler tick: a time, a step and a value per metric, NaN where a
metric has no value. A *bucket* stands for several rows: last time, highest step, and per metric
minimum, maximum, mean and count over the rows that had a value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FACTOR = 16
"""Rows of a level that make one bucket of the next."""

FRAME_ROWS = 512
"""Rows of a full frame; a multiple of FACTOR, so no bucket crosses two frames."""

AXES = 2
"""Matrix rows before the metrics: time and step."""


@dataclass(frozen=True, slots=True)
class Block:
    """`n` consecutive buckets of a series; raw rows are buckets of one.

    `ts` (n,) in epoch seconds, `step` (n,); `low`, `high`, `mean`, `count` are (len(keys), n).
    Where `count` is 0 the other three are NaN.
    """

    keys: tuple[str, ...]
    ts: Floats
    step: Floats
    low: Floats
    high: Floats
    mean: Floats
    count: Floats

    def __len__(self) -> int:
        return len(self.ts)

    @classmethod
    def raw(cls, keys: Sequence[str], ts: Floats, step: Floats, values: Floats) -> Block:
        """Return rows as buckets of one; `values` is (len(keys), n)."""
        return cls(tuple(keys), ts, step, values, values, values, (~np.isnan(values)).astype(float))

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[float, int, Mapping[str, float | None]]]) -> Block:
        """Return rows (time, step, values) in order; an absent or None value becomes NaN."""
        keys = tuple(dict.fromkeys(key for _, _, values in rows for key in values))
        # np.array turns None into NaN for a float dtype.
        table = [[values.get(key) for _, _, values in rows] for key in keys]
        values = np.array(table, dtype=float).reshape(len(keys), len(rows))
        ts = np.array([row[0] for row in rows], dtype=float)
        return cls.raw(keys, ts, np.array([row[1] for row in rows], dtype=float), values)

    def slice(self, start: int, stop: int) -> Block:
        """Return buckets start to stop."""
        part = np.s_[:, start:stop]
        return Block(self.keys, self.ts[start:stop], self.step[start:stop], self.low[part],
                     self.high[part], self.mean[part], self.count[part])  # fmt: skip

    def with_keys(self, keys: Sequence[str]) -> Block:
        """Return the block with exactly these metrics, in this order, NaN for new ones."""
        keys = tuple(keys)
        if keys == self.keys:
            return self
        row_of = {key: row for row, key in enumerate(self.keys)}
        have = [(new, row_of[key]) for new, key in enumerate(keys) if key in row_of]

        def pick(values: Floats, absent: float) -> Floats:
            out = np.full((len(keys), len(self)), absent)
            for new, old in have:
                out[new] = values[old]
            return out

        return Block(keys, self.ts, self.step, pick(self.low, np.nan), pick(self.high, np.nan),
                     pick(self.mean, np.nan), pick(self.count, 0.0))  # fmt: skip


def join(blocks: Iterable[Block]) -> Block:
    """Return blocks one after another, with the union of their metrics."""
    blocks = [block for block in blocks if len(block)]
    keys = tuple(dict.fromkeys(key for block in blocks for key in block.keys))
    aligned = [block.with_keys(keys) for block in blocks]

    def stack(name: str) -> Floats:
        return np.concatenate([getattr(block, name) for block in aligned], axis=-1)

    if not aligned:
        empty = np.empty((0, 0))
        return Block((), np.empty(0), np.empty(0), empty, empty, empty, empty)
    return Block(keys, stack("ts"), stack("step"), stack("low"), stack("high"), stack("mean"),
                 stack("count"))  # fmt: skip


def merge(block: Block, starts: NDArray[np.intp]) -> Block:
    """Return one bucket per group of buckets; group i begins at `starts[i]` (rising from 0).

    NaN (missing) is ignored, the mean is weighted by count.
    """
    if len(block) == 0 or len(starts) == len(block):
        return block
    count = np.add.reduceat(block.count, starts, axis=1)
    # An infinite value times a zero count would be NaN and spoil the group: zero it first.
    weighted = np.where(block.count > 0, block.mean, 0.0) * block.count
    with np.errstate(invalid="ignore"):
        total = np.add.reduceat(weighted, starts, axis=1)
        mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        low = np.fmin.reduceat(block.low, starts, axis=1)
        high = np.fmax.reduceat(block.high, starts, axis=1)
    ends = np.append(starts[1:], len(block)) - 1
    return Block(block.keys, block.ts[ends], np.maximum.reduceat(block.step, starts), low, high,
                 mean, count)  # fmt: skip


def encode(block: Block, level: int) -> bytes:
    """Return a block's bytes: values alone at level 0, all four statistics above it.

    The 8 bytes of the floats are stored plane by plane and deflated: neighbours share their
    exponent bytes, so this packs memory counters and times to a fraction of their size.
    """
    parts = [block.mean] if level == 0 else [block.low, block.high, block.mean, block.count]
    matrix = np.vstack([block.ts[None], block.step[None], *parts])
    planes = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), 1)


def decode(data: bytes, keys: Sequence[str], rows: int, level: int) -> Block:
    """Return the block that `encode` wrote.

    Raises ValueError or zlib.error where the bytes are damaged.
    """
    stats = 1 if level == 0 else 4
    height = AXES + stats * len(keys)
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(8, height * rows)
    matrix = np.ascontiguousarray(planes.T).view(np.float64).reshape(height, rows)
    ts, step = matrix[0], matrix[1]
    if level == 0:
        return Block.raw(keys, ts, step, matrix[AXES:])
    low, high, mean, count = matrix[AXES:].reshape(4, len(keys), rows)
    return Block(tuple(keys), ts, step, low, high, mean, count)
