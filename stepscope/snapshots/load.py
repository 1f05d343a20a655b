"""A snapshot file as Python objects: segments as torch lists them, the history as columns."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.formatting import format_bytes, printable
from stepscope.snapshots.stacks import Stacks
from stepscope.snapshots.traces import Labels, Trace, TraceRows
from stepscope.snapshots.unpickling import NewLists, Progress, unpickle

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


def load(
    path: Path, *, progress: Progress = lambda read: None, own_process: bool = False
) -> Snapshot:
    """Return a snapshot; nothing that the file names is called. Raises SnapshotError and OSError.

    A foreign file may ask for all memory there is: `opening.open_snapshot` reads it in a process
    with limits. `own_process` says that this is one: the history is then read while the file is,
    which takes half the memory, and garbage is not collected any more.
    """
    with _opened(path) as (file, size), _no_collection():
        stacks, labels = Stacks(), Labels()
        histories = _Histories(stacks, labels, watch=own_process)
        try:
            root = unpickle(file, look=histories.look, progress=progress)
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
        segments, traces, settings = _parts(path, root)
        return Snapshot(
            path.name, size, segments, histories.finish(traces), stacks, labels, settings
        )


class _Histories:
    """The histories of all devices, taken over while the file is read or afterwards."""

    def __init__(self, stacks: Stacks, labels: Labels, *, watch: bool) -> None:
        self._stacks = stacks
        self._labels = labels
        self._lists = NewLists(_is_history) if watch else None
        self._rows: dict[int, tuple[list[Any], TraceRows, int]] = {}

    def look(self) -> None:
        """Take over what has been read completely."""
        for history in [] if self._lists is None else self._lists.look():
            self._take(history)

    def finish(self, traces: list[Any]) -> dict[int, Trace]:
        """Return the columns by device."""
        found = {}
        for device, history in enumerate(traces[:DEVICES_LIMIT]):
            if isinstance(history, list) and history:
                found[device] = self._take(history).finish()
        return found

    def _take(self, history: list[Any]) -> TraceRows:
        _, rows, done = self._rows.get(id(history)) or (
            history,
            TraceRows(self._stacks, self._labels),
            0,
        )
        # The unpickler adds entries that are complete.
        rows.add(history[done:])
        self._rows[id(history)] = (history, rows, len(history))
        return rows


def _is_history(items: list[Any]) -> bool:
    return type(items[0]) is dict and "action" in items[0]


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
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise SnapshotError(f"{_name(path)}: must be a file, got something else. {REMEDY}")
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
