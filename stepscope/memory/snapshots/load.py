"""A snapshot file as Python objects: segments as torch lists them, the history as columns."""

from __future__ import annotations

import gc
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.pickle_loader import Pickle, Progress, Regular
from stepscope.memory.snapshots.runs import NotActions, columns_of
from stepscope.memory.snapshots.stacks import Stacks
from stepscope.memory.snapshots.trace import Columns, Labels, Trace, TraceRows

SIZE_LIMIT = 2**30
"""Bytes of a file; what it holds needs up to four times as much memory."""
DEVICES_LIMIT = 64
"""Devices whose history is kept."""
REMEDY = "Take it with torch.cuda.memory._dump_snapshot, or with Memory snapshot on the page Live."


class SnapshotError(ValueError):
    """A file that cannot be opened as a snapshot; the message is a sentence with a remedy."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a file holds. Blocks in `segments` have lists of frames that `stacks` knows."""

    name: str
    size: int
    """Bytes of the file."""
    segments: list[Any]
    traces: dict[int, Trace]
    """By torch's index of the device, those with a history."""
    stacks: Stacks
    labels: Labels
    settings: dict[str, Any]
    """The allocator's settings, {} where the file does not tell them."""


def load(path: Path, *, progress: Progress = lambda read: None) -> Snapshot:
    """Return a snapshot; nothing that the file names is called. Raises SnapshotError and OSError.

    A foreign file may ask for all memory there is: `opening.open_snapshot` reads it in a process
    with limits.
    """
    with _opened(path) as (file, size), _no_collection():
        try:
            try:
                return _loaded(path, file, size, Regular(), progress)
            except NotActions:
                file.seek(0)
                return _loaded(path, file, size, None, progress)
        except SnapshotError:
            raise
        except MemoryError as error:
            raise SnapshotError(
                f"{_name(path)}: must fit into the memory allowed for it, got {format_bytes(size)} "
                "that need more. Record fewer steps."
            ) from error
        except Exception as error:
            # Python's unpickler raises anything for a broken file, as its documentation says.
            reason = printable(str(error))[:200] or type(error).__name__
            raise SnapshotError(
                f"{_name(path)}: must be a pickle of plain containers, got one that cannot be read "
                f"({reason}). {REMEDY}"
            ) from error


def _loaded(
    path: Path, file: IO[bytes], size: int, regular: Regular | None, progress: Progress
) -> Snapshot:
    """Return the snapshot in a file. Raises NotActions, SnapshotError, and anything else."""
    stacks, labels = Stacks(), Labels()
    pickle = Pickle(file, regular, progress)
    segments, histories, settings = _parts(path, pickle.load())
    runs = None
    if regular is not None:
        runs = columns_of(regular, pickle.remembered, stacks, labels)
    lengths = [] if regular is None else regular.lengths
    join = _Join(runs, lengths, stacks, labels)
    traces = {
        device: join.trace(history)
        for device, history in enumerate(histories[:DEVICES_LIMIT])
        if isinstance(history, list) and history
    }
    return Snapshot(path.name, size, segments, traces, stacks, labels, settings)


class _Join:
    """Puts the histories together: of dicts, and of runs where their numbers stand."""

    def __init__(
        self, runs: Columns | None, lengths: list[int], stacks: Stacks, labels: Labels
    ) -> None:
        self._runs = runs
        self._ends = np.concatenate([[0], np.cumsum(lengths)]).astype(int).tolist()
        self._next = 0
        self._stacks = stacks
        self._labels = labels
        self._seen: set[int] = set()

    def trace(self, history: list[Any]) -> Trace:
        """Return one device's history; each one, and each run, is read once."""
        rows = TraceRows(self._stacks, self._labels)
        if id(history) not in self._seen:
            self._seen.add(id(history))
            for is_run, items in itertools.groupby(history, self._is_next):
                if is_run:
                    rows.add_columns(self._columns(len(list(items))))
                else:
                    rows.add(list(items))
        return rows.finish()

    def _is_next(self, item: object) -> bool:
        """Say whether this is the number of the next run; count it then."""
        if type(item) is not int or item != self._next or item + 1 >= len(self._ends):
            return False
        self._next += 1
        return True

    def _columns(self, count: int) -> Columns:
        """Return the rows of the newest runs, which follow one another."""
        assert self._runs is not None
        here = slice(self._ends[self._next - count], self._ends[self._next])
        action, address, size, time_us, stack, phase = self._runs
        return action[here], address[here], size[here], time_us[here], stack[here], phase[here]


def _parts(path: Path, root: object) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return segments, histories by device and the settings; a list alone has segments."""
    if isinstance(root, list):
        root = {"segments": root}
    if not isinstance(root, dict):
        raise SnapshotError(
            f"{_name(path)}: must hold a dict with segments, got {type(root).__name__}. {REMEDY}"
        )
    segments, traces = root.get("segments"), root.get("device_traces")
    settings = root.get("allocator_settings")
    if not isinstance(segments, list) and not isinstance(traces, list):
        named = [key[:20] if isinstance(key, str) else type(key).__name__ for key in root]
        keys = ", ".join(printable(key) for key in named[:5]) or "nothing"
        raise SnapshotError(
            f"{_name(path)}: must hold segments or device_traces, got {keys}. {REMEDY}"
        )
    return (
        segments if isinstance(segments, list) else [],
        traces if isinstance(traces, list) else [],
        settings if isinstance(settings, dict) else {},
    )


def _name(path: Path) -> str:
    return printable(path.name)[:100]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, int]]:
    """Open a plain file of a size that is read. Raises SnapshotError and OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):  # `open` of a folder names the descriptor alone
        os.close(number)
        raise SnapshotError(f"{_name(path)}: must be a file, got something else. {REMEDY}")
    with open(number, "rb") as file:
        if found.st_size > SIZE_LIMIT:
            raise SnapshotError(
                f"{_name(path)}: must have at most {format_bytes(SIZE_LIMIT)}, got "
                f"{format_bytes(found.st_size)}. Record fewer steps, or with a lower max_entries."
            )
        yield file, found.st_size


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: there is none among millions of new objects, and it would be sought."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
