"""The rows of a run, read a slice at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from stepscope.store import Block, RunReader, SeriesInfo, StoreError
from stepscope.store.frames import FRAME_ROWS

SLICE_ROWS = 64 * FRAME_ROWS


class Rows:
    """The rows of one stream of a run, as many as there are now; `keys` are all its metrics."""

    def __init__(self, folder: Path, stream: str, rank: int) -> None:
        self.folder, self.stream, self._rank = folder, stream, rank
        with RunReader(folder, rank) as reader:
            self._series = [series for series in reader.series() if series.stream == stream]
            keys = (reader.keys(series.id) for series in self._series)
            self.keys = tuple(dict.fromkeys(itertools.chain.from_iterable(keys)))

    def __len__(self) -> int:
        return sum(series.rows for series in self._series)

    def slices(self) -> Iterator[tuple[str, Block]]:
        """Yield source ("" or a GPU's UUID) and rows, one source after another.

        Each slice opens the store anew: a reader that stays would let its write-ahead log grow.
        """
        for series in self._series:
            start = 0
            while start < series.rows:
                block = self._read(series, start)
                yield series.source, block.with_keys(self.keys)
                start += len(block)

    def _read(self, series: SeriesInfo, start: int) -> Block:
        with RunReader(self.folder, self._rank) as reader:
            block = reader.read(series.id, start, min(start + SLICE_ROWS, series.rows), 1)
        if not len(block):
            raise StoreError(
                f"{self.folder.name}: the store is damaged (no row {start} of {series.rows} in "
                f"{series.stream}). Restore the file from a copy."
            )
        return block
