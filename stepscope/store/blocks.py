"""Blocks of a series: rows, or buckets of several rows, and their bytes on disk.

A *row* has a time, a step and a value per metric. A *bucket* of rows has the last time, the highest
step, and per metric minimum, maximum, mean and count of the finite values, and the number of
non-finite values. In an array NaN is a missing value; a recorded NaN has RECORDED_NAN's bits.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.common.json_values import parse_json
from stepscope.common.metrics import Stream
from stepscope.store.ring import RingRows, Slots

Floats = NDArray[np.float64]

STEPS = (Stream.STEPS, "")  # the series of the steps: its stream and source
STEP_TIME = "perf/step_time"
SAMPLES = "perf/samples"
RATE = "perf/samples_per_sec"
RATES = {SAMPLES: RATE, "perf/tokens": "perf/tokens_per_sec"}
"""Counts of a step that are recorded as rates: divided by its step time."""
LOSS = "train/loss"

FACTOR = 16  # rows of a level that make one bucket of the next
FRAME_ROWS = 256  # rows of a full frame; a multiple of FACTOR, so no bucket crosses two frames
AXES = 2  # matrix rows before the metrics: time and step
MAX_KEYS, MAX_KEYS_LENGTH = 4096, 2**20
"""Maximum number of metrics in a frame, and of characters in their list."""
MAX_TIME_S = 253_402_300_799.0  # the last second of the year 9999: no library formats a later one
MAX_STEP = 2.0**63
_AXIS_LIMITS = np.array([[MAX_TIME_S], [MAX_STEP]])

_NAN_BITS = 0x7FF8_0000_0000_0001
RECORDED_NAN = float(np.array(_NAN_BITS, dtype=np.uint64).view(np.float64))


def missing(values: Floats) -> NDArray[np.bool_]:
    """Return a mask of the missing values: every NaN but RECORDED_NAN."""
    other: NDArray[np.bool_] = values.view(np.uint64) != _NAN_BITS
    return np.isnan(values) & other


def recorded(values: Floats) -> Floats:
    """Return the values with each NaN replaced by RECORDED_NAN."""
    return np.where(np.isnan(values), RECORDED_NAN, values)


@dataclass(frozen=True, slots=True)
class SeriesBlock:
    """`n` consecutive buckets of a series; raw rows are buckets of one.

    `ts` (n,) is in epoch seconds, `step` is (n,), the other arrays are (len(keys), n). `count` is
    the number of finite values, `nonfinite` that of the others. Where `count` is 0, `low`, `high`
    and `mean` are NaN; in a raw row, the non-finite value.
    """

    keys: tuple[str, ...]
    ts: Floats
    step: Floats
    low: Floats
    high: Floats
    mean: Floats
    count: Floats
    nonfinite: Floats

    def __len__(self) -> int:
        return len(self.ts)

    def arrays(self) -> tuple[Floats, ...]:
        """Return the seven arrays in field order."""
        return self.ts, self.step, self.low, self.high, self.mean, self.count, self.nonfinite

    @classmethod
    def raw(cls, keys: Sequence[str], ts: Floats, step: Floats, values: Floats) -> SeriesBlock:
        """Return rows as buckets of one; `values` is (len(keys), n)."""
        finite = np.isfinite(values)
        count, nonfinite = finite.astype(float), (~finite & ~missing(values)).astype(float)
        return cls(tuple(keys), ts, step, values, values, values, count, nonfinite)

    def slice(self, start: int, stop: int) -> SeriesBlock:
        """Return the buckets [start, stop)."""
        return SeriesBlock(self.keys, *(part[..., start:stop] for part in self.arrays()))

    def with_keys(self, keys: Sequence[str]) -> SeriesBlock:
        """Return the block with exactly these metrics; new metrics have missing values."""
        keys = tuple(keys)
        if keys == self.keys:
            return self
        kept = set(self.keys)
        new = [row for row, key in enumerate(keys) if key in kept]
        old = [self.keys.index(keys[row]) for row in new]
        ts, step, *statistics = self.arrays()
        absent = (np.nan, np.nan, np.nan, 0.0, 0.0)
        parts = [np.full((len(keys), len(self)), value) for value in absent]
        for part, values in zip(parts, statistics, strict=True):
            part[new] = values[old]
        return SeriesBlock(keys, ts, step, *parts)


def join(blocks: Iterable[SeriesBlock]) -> SeriesBlock:
    """Concatenate blocks, with the union of their metrics."""
    blocks = [block for block in blocks if len(block)]
    keys = tuple(dict.fromkeys(key for block in blocks for key in block.keys))
    aligned = [block.with_keys(keys).arrays() for block in blocks]
    if not aligned:
        return SeriesBlock((), np.empty(0), np.empty(0), *[np.empty((0, 0))] * 5)
    return SeriesBlock(
        keys, *(np.concatenate(parts, axis=-1) for parts in zip(*aligned, strict=True))
    )


def merge(block: SeriesBlock, starts: NDArray[np.intp]) -> SeriesBlock:
    """Merge groups of buckets into one bucket each; group i begins at `starts[i]`."""
    if len(block) == 0 or len(starts) == len(block):
        return block
    count = np.add.reduceat(block.count, starts, axis=1)
    nonfinite = np.add.reduceat(block.nonfinite, starts, axis=1)
    some = block.count > 0
    with np.errstate(invalid="ignore", over="ignore"):  # a sum of large values may overflow
        total = np.add.reduceat(np.where(some, block.mean, 0.0) * block.count, starts, axis=1)
        mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        low = np.fmin.reduceat(np.where(some, block.low, np.nan), starts, axis=1)
        high = np.fmax.reduceat(np.where(some, block.high, np.nan), starts, axis=1)
    ends = np.append(starts[1:], len(block)) - 1
    step = np.maximum.reduceat(block.step, starts)
    return SeriesBlock(block.keys, block.ts[ends], step, low, high, mean, count, nonfinite)


def encode(block: SeriesBlock, level: int) -> bytes:
    """Return a block's bytes: times, steps, and values at level 0, else the five statistics.

    Bytes are grouped by their position in the float and deflated: neighbors share exponent bytes.
    """
    ts, step, *statistics = block.arrays()
    parts = [block.mean] if level == 0 else statistics
    matrix = np.vstack([ts[None], step[None], *parts])
    planes = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), 1)


def decode(data: object, keys: Sequence[str], rows: int, level: int) -> SeriesBlock:
    """Return the block that `encode` wrote. Raises ValueError for damaged bytes."""
    statistics = 1 if level == 0 else 5
    height = AXES + statistics * len(keys)
    if not isinstance(data, bytes) or not 0 < rows <= FRAME_ROWS:
        raise ValueError(f"must be bytes of {FRAME_ROWS} rows at most, got {rows} rows")
    try:
        inflated = zlib.decompressobj().decompress(data, 8 * height * rows + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    planes = np.frombuffer(inflated, np.uint8).reshape(8, height * rows)
    matrix = np.ascontiguousarray(planes.T).view(np.float64).reshape(height, rows)
    ts, step = matrix[0], matrix[1]
    if not (np.abs(matrix[:AXES]) <= _AXIS_LIMITS).all():
        raise ValueError("a time or a step is out of range")
    if level == 0:
        return SeriesBlock.raw(keys, ts, step, matrix[AXES:])
    return SeriesBlock(tuple(keys), ts, step, *matrix[AXES:].reshape(5, len(keys), rows))


@functools.lru_cache(maxsize=16)  # each frame of a store names its layout
def decode_keys(text: object) -> tuple[str, ...]:
    """Return the metrics of a layout. Raises ValueError unless it is a list of names."""
    if not isinstance(text, str) or len(text) > MAX_KEYS_LENGTH:
        raise ValueError("the metrics of a layout must be a list of names")
    names = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_KEYS)]
    return msgspec.convert(parse_json(text), names)


@dataclass(frozen=True, slots=True)
class Event:
    """Event marker; `ts` in epoch seconds, `data` such as values before and after."""

    ts: float
    step: int
    epoch: int
    kind: str
    text: str
    data: dict[str, Any]


def series_blocks(rows: RingRows) -> dict[tuple[str, ...], SeriesBlock]:
    """Return the new rows of each series by stream and source; those of steps may be none."""
    layouts = rows.layouts
    names = dict.fromkeys([STEPS, *(layout[:2] for layout in layouts)])
    numbers = {name: number for number, name in enumerate(names)}
    series_of = np.array([numbers[layout[:2]] for layout in layouts], dtype=np.intp)
    series = series_of[rows.slots["layout"]]
    return {name: _block(rows.slots[series == at], layouts) for name, at in numbers.items()}


def _block(slots: Slots, layouts: Sequence[tuple[str, ...]]) -> SeriesBlock:
    """Return the rows of one series, with rates in place of counts."""
    # The slots of one wide row follow each other with the same time and step.
    is_first = np.ones(len(slots), dtype=bool)
    is_first[1:] = (np.diff(slots["ts"]) != 0) | (np.diff(slots["step"]) != 0)
    row_of = np.cumsum(is_first) - 1
    firsts = slots[is_first]
    columns: dict[str, Floats] = {}
    for number in sorted(set(slots["layout"].tolist())):  # np.unique imports numpy.ma: 10 ms
        chosen = slots["layout"] == number
        for place, key in enumerate(layouts[number][2:]):
            column = columns.setdefault(key, np.full(len(firsts), np.nan))
            column[row_of[chosen]] = recorded(slots["values"][chosen, place])
    for amount in RATES.keys() & columns.keys():
        with np.errstate(divide="ignore", invalid="ignore"):  # a step time of 0
            rate = columns.pop(amount) / columns.get(STEP_TIME, np.nan)
        columns.setdefault(RATES[amount], rate)
    values = np.array([*columns.values()]).reshape(len(columns), len(firsts))
    return SeriesBlock.raw(tuple(columns), firsts["ts"], firsts["step"].astype(float), values)


def find_broken_losses(block: SeriesBlock, known: set[str], epoch: int = 0) -> list[Event]:
    """Return an event for each loss that is NaN or infinite first here; add them to `known`."""
    events = []
    for row, key in enumerate(block.keys):
        is_loss = key == LOSS or key.startswith(f"{LOSS}.")
        if is_loss and key not in known and block.nonfinite[row].any():
            known.add(key)
            at = int(np.argmax(block.nonfinite[row]))
            name = "" if key == LOSS else f"({key}) "
            step = int(block.step[at])
            text = f"The loss {name}is {block.mean[row, at]} at step {step}"
            events.append(Event(float(block.ts[at]), step, epoch, "nan", text, {}))
    return events
