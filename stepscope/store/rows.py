"""All rows of one stream of a run, a slice at a time, so that memory does not grow with the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.store.blocks import FRAME_ROWS, Block
from stepscope.store.reader import RunReader, SeriesInfo
from stepscope.store.schema import StoreError

SLICE_ROWS, SLICE_VALUES = 64 * FRAME_ROWS, 2**21
"""Rows of a slice; fewer of many metrics."""


class Rows:
    """The rows that a stream has now. `keys` are its metrics, `sources` "" or GPUs by UUID."""

    def __init__(self, folder: Path, stream: str, rank: int) -> None:
        self.folder, self.stream, self._rank = folder, stream, rank
        with RunReader(folder, rank) as reader:
            self._series = [series for series in reader.series() if series.stream == stream]
            keys = (reader.keys(series.id) for series in self._series)
            self.keys = tuple(dict.fromkeys(itertools.chain.from_iterable(keys)))
        self.sources = tuple(series.source for series in self._series)

    def __len__(self) -> int:
        return sum(series.rows for series in self._series)

    def slices(
        self, keys: Sequence[str] | None = None, source: str | None = None
    ) -> Iterator[tuple[str, Block]]:
        """Yield source and rows, one source after another; None means all keys, or all sources.

        Each slice opens the store anew: while a reader is open the write-ahead log grows.
        """
        for series in self._series:
            if source not in (None, series.source):
                continue
            start = 0
            while start < series.rows:
                block = self._read(series, start)
                yield series.source, block.with_keys(self.keys if keys is None else keys)
                start += len(block)

    def _read(self, series: SeriesInfo, start: int) -> Block:
        rows = min(SLICE_ROWS, max(FRAME_ROWS, SLICE_VALUES // (len(self.keys) + 1)))
        stop = min(start + rows - rows % FRAME_ROWS, series.rows)
        with RunReader(self.folder, self._rank) as reader:
            block = reader.read(series.id, start, stop, 1)
        if not len(block):
            raise StoreError(
                f"{self.folder.name}: the store is damaged (no row {start} of {series.rows} in "
                f"{series.stream}). Restore the file from a copy."
            )
        return block
