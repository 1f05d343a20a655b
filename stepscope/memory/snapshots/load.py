"""Read an untrusted snapshot file without calling any function that it names."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.common.files import open_regular_file
from stepscope.common.formatting import format_bytes, printable
from stepscope.common.plain_pickle import PlainUnpickler
from stepscope.memory.snapshots.summary import SnapshotSummary, summarize

MAX_FILE_BYTES = 250 * 2**20  # Its Python objects need up to nine times as much memory.
CHUNK = 2**20  # Bytes read at once.
SMALLER = (
    "Record fewer steps or a lower max_entries, or open it with https://pytorch.org/memory_viz."
)
REMEDY = "Record it with torch.cuda.memory._dump_snapshot, or with Memory snapshot on the page."


class SnapshotError(ValueError):
    """Raised for a file that is no valid snapshot; the message is a sentence with a remedy."""


def load(path: Path) -> SnapshotSummary:
    """Return the summary of a snapshot. Raises SnapshotError.

    A file may need any amount of memory: `open_snapshot` limits it in a child process.
    """
    name = printable(path.name)[:100]
    try:
        descriptor = open_regular_file(path, follow_links=True)
    except OSError as error:
        raise SnapshotError(
            f"{name}: must be a file that can be read ({error.strerror}). {REMEDY}"
        ) from error
    with open(descriptor, "rb", CHUNK) as file, _no_collection():
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise SnapshotError(
                f"{name}: must have at most {MAX_FILE_BYTES:,} bytes, got {size:,}. {SMALLER}"
            )
        try:
            root = PlainUnpickler(file).load()
        except MemoryError as error:
            raise SnapshotError(
                f"{name}: a file of {format_bytes(size)} needs more memory than its process may "
                f"use. {SMALLER}"
            ) from error
        except Exception as error:
            # Python's unpickler raises anything for a broken file, as documented.
            reason = printable(str(error))[:200] or type(error).__name__
            raise SnapshotError(
                f"{name}: must be a pickle of plain containers, got one that cannot be read "
                f"({reason}). {REMEDY}"
            ) from error
        if not isinstance(root, dict) or not isinstance(root.get("segments"), list):
            raise SnapshotError(
                f"{name}: must hold a dict with a list of segments, got {type(root).__name__}. "
                f"{REMEDY}"
            )
        return summarize(root)


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
