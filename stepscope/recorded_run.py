"""`stepscope.open`: read a recorded run in Python, live or ended. Never writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepscope.common.metrics import Stream
from stepscope.run import (
    RUN_JSON,
    RunError,
    RunInfo,
    RunStatus,
    check_readable,
    read_run,
    run_folder,
    run_folders,
    runs_root,
)
from stepscope.run.rank_info import numbers_with
from stepscope.store import EventRow, SeriesBlock, StoreReader
from stepscope.store.blocks import STEPS, Floats, join, series_blocks
from stepscope.store.reader import EVERY, StreamRows
from stepscope.store.ring import RingError, read_ring, rows_after


class Series(NamedTuple):
    """One metric over a run, with a value for each row; NaN for a missing value."""

    time: Floats  # Epoch seconds.
    step: NDArray[np.int64]
    value: Floats


class Run:
    """One rank of a recorded run. Each attribute and call reads the current content of the folder.

    Keeps no file open. A live run writes twice a second. The last steps of a killed run are read
    from its ring buffer. Raises RunError for an unknown run or metric, StoreError for a missing or
    damaged store.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self.info()  # raises RunError if this is not a run folder

    def info(self) -> RunInfo:
        """Return the run metadata and the current status."""
        return read_run(self.folder)

    @property
    def id(self) -> str:
        """The name of the run folder."""
        return self.folder.name

    @property
    def status(self) -> RunStatus:
        """The current status, which is also a string, such as "finished"."""
        return self.info().status

    @property
    def run_json(self) -> dict[str, Any]:
        """The run metadata: the content of `run.json` (docs/storage.md)."""
        return self.info().run_json

    @property
    def config(self) -> dict[str, Any]:
        """The settings that the script passed."""
        return dict(self.run_json.get("config") or {})

    @property
    def ranks(self) -> tuple[int, ...]:
        """Folder ranks of the processes with a store, for `rank` of `open`."""
        return tuple(numbers_with(self.folder, "sqlite"))

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics of the run, beginning with metrics of the steps."""
        steps, left = self._steps()
        samples, devices = self._rows(Stream.SAMPLES), self._rows(Stream.DEVICES)
        return tuple(dict.fromkeys((*steps.keys, *left.keys, *samples.keys, *devices.keys)))

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the sampled GPUs."""
        return self._rows(Stream.DEVICES).sources

    def series(self, key: str, gpu: str | None = None) -> Series:
        """Return a metric over the whole run (1 s per million rows).

        Metrics of a stream share their rows, so the arrays of an ended run have the same length.
        `gpu` is the UUID of the GPU for a metric of `gpu/`; optional if only one GPU was sampled.
        """
        for stream in Stream:
            rows, last = self._steps() if stream is Stream.STEPS else (self._rows(stream), join([]))
            if key in (*rows.keys, *last.keys):
                source = self._source(key, rows.sources, gpu) if stream is Stream.DEVICES else ""
                blocks = [block for _, block in rows.slices((key,), source)]
                found = join([*blocks, last.with_keys((key,))]).with_keys((key,))
                return Series(found.ts, found.step.astype(np.int64), found.mean[0])
        known = ", ".join(self.metrics) or "no metric yet"
        raise RunError(f"metric: {self.id} has no {key!r}. It has {known}.")

    def events(self) -> list[EventRow]:
        """Return the events of the run, oldest first."""
        with StoreReader(self.folder, self.rank) as reader:
            return reader.events(limit=EVERY)

    def __repr__(self) -> str:
        return repr(self.info()).replace("RunInfo", "Run", 1)

    def _rows(self, stream: Stream) -> StreamRows:
        return StreamRows(self.folder, stream, self.rank)

    def _source(self, key: str, gpus: tuple[str, ...], gpu: str | None) -> str:
        if gpu in gpus:
            return str(gpu)
        if gpu is None and len(gpus) == 1:
            return gpus[0]
        raise RunError(f"gpu: {key} of {self.id} is of {', '.join(gpus)}, got {gpu}. Name one.")

    def _steps(self) -> tuple[StreamRows, SeriesBlock]:
        """Return the stored steps, and those of a killed process that only its ring has."""
        path, ring = self.folder / f"rank{self.rank}.ring", None
        if os.path.exists(path) and not self.status.live:
            with contextlib.suppress(RingError, OSError):  # a damaged ring, or stored meanwhile
                ring = read_ring(path)
        steps = self._rows(Stream.STEPS)  # after the ring: these may be moved now
        if ring is None:
            return steps, join([])
        return steps, series_blocks(rows_after(ring, steps.stored_slots))[STEPS]


def open_run(run: str | Path, *, runs: str | Path | None = None, rank: int = 0) -> Run:
    """Open a recorded run by its folder, or below `runs` by its id (the folder's name).

    A part of the id is enough if no other run has it. `runs` is the folder of all runs, by default
    STEPSCOPE_RUNS or ./runs; `rank` is the folder rank of a process of a distributed run. Raises
    RunError for an unknown run, and for a part of several ids.
    """
    if os.path.isfile(os.path.join(run, RUN_JSON)):
        return Run(Path(run).resolve(), rank)
    if os.path.isabs(run):
        check_readable(Path(run))
    root = runs_root(Path(runs) if runs is not None else None)
    name = str(run)
    if name and not os.path.lexists(root / name):
        found = [folder.name for folder in run_folders(root) if name in folder.name]
        if len(found) > 1:
            raise RunError(
                f"run: must be of one run, {name[:120]!r} is part of {len(found)}, such as "
                f"{found[0]} and {found[1]}."
            )
        name = found[0] if found else name
    return Run(run_folder(root, name), rank)
