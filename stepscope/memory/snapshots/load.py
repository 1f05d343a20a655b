"""Load a snapshot file as Python objects: segments as torch lists them, the trace as columns."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stepscope.common.files import open_regular_file
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.snapshots.stacks import StackTable
from stepscope.memory.snapshots.timeline import AllocatorTrace, read_trace

MAX_FILE_BYTES = 250 * 2**20  # Its Python objects need up to nine times as much memory.
CHUNK = 2**20  # Bytes read at once.
MAX_DEVICES = 64  # Maximum number of devices with a trace.
MAX_LABEL_CHARS = 60
SMALLER = (
    "Record fewer steps or a lower max_entries, or open it with https://pytorch.org/memory_viz."
)
REMEDY = "Record it with torch.cuda.memory._dump_snapshot, or with Memory snapshot on the page."


class SnapshotError(ValueError):
    """Raised for a file that is no valid snapshot; the message is a sentence with a remedy."""


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The content of a file; lists of frames in `segments` are numbered by `stacks`."""

    name: str
    size: int  # Bytes of the file.
    segments: list[Any]
    traces: dict[int, AllocatorTrace]  # By torch's index of the device, those with a history.
    stacks: StackTable
    labels: tuple[str, ...]  # The labels of allocations, by number.


class _PlainUnpickler(pickle.Unpickler):
    """Refuses classes, functions and persistent objects."""

    def find_class(self, module: str, name: str) -> NoReturn:
        what = f"{module}.{name}"[:100]
        raise pickle.UnpicklingError(f"it names {what!r}, and only plain containers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def load(path: Path) -> MemorySnapshot:
    """Return a snapshot without calling any function named in it. Raises SnapshotError.

    A file may need any amount of memory: `open_snapshot` limits it in a child process.
    """
    try:
        descriptor = open_regular_file(path, follow_links=True)
    except OSError as error:
        raise SnapshotError(
            f"{_name(path)}: must be a file that can be read ({error.strerror}). {REMEDY}"
        ) from error
    with open(descriptor, "rb", CHUNK) as file, _no_collection():
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise SnapshotError(
                f"{_name(path)}: must have at most {MAX_FILE_BYTES:,} bytes, got {size:,}. "
                f"{SMALLER}"
            )
        try:
            return _snapshot(path, size, _PlainUnpickler(file).load())
        except SnapshotError:
            raise
        except MemoryError as error:
            raise SnapshotError(
                f"{_name(path)}: a file of {format_bytes(size)} needs more memory than its process "
                f"may use. {SMALLER}"
            ) from error
        except Exception as error:
            # Python's unpickler raises anything for a broken file, as documented.
            reason = printable(str(error))[:200] or type(error).__name__
            raise SnapshotError(
                f"{_name(path)}: must be a pickle of plain containers, got one that cannot be read "
                f"({reason}). {REMEDY}"
            ) from error


def _snapshot(path: Path, size: int, root: object) -> MemorySnapshot:
    if not isinstance(root, dict):
        raise SnapshotError(
            f"{_name(path)}: must hold a dict with segments, got {type(root).__name__}. {REMEDY}"
        )
    segments, histories = root.get("segments"), root.get("device_traces")
    if not isinstance(segments, list) and not isinstance(histories, list):
        named = [key[:20] if isinstance(key, str) else type(key).__name__ for key in root]
        keys = ", ".join(printable(key) for key in named[:5]) or "nothing"
        raise SnapshotError(
            f"{_name(path)}: must hold segments or device_traces, got {keys}. {REMEDY}"
        )
    stacks = StackTable()
    labels: dict[str, int] = {}
    traces, seen = {}, set()
    histories = histories if isinstance(histories, list) else []
    for device, history in enumerate(histories[:MAX_DEVICES]):
        if isinstance(history, list) and history:
            # A small file may name one list many times.
            entries = [] if id(history) in seen else history
            seen.add(id(history))
            traces[device] = read_trace(entries, stacks, labels)
    return MemorySnapshot(
        name=path.name,
        size=size,
        segments=segments if isinstance(segments, list) else [],
        traces=traces,
        stacks=stacks,
        labels=tuple(printable(label[:MAX_LABEL_CHARS]) for label in labels),
    )


def _name(path: Path) -> str:
    return printable(path.name)[:100]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: with millions of new objects it takes most of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
