"""Open an untrusted snapshot file in a resource-limited subprocess and cache its summary.

This module is that subprocess. The cache is next to the file, or, if that folder is read-only, in a
spare folder.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.common.files import atomic_replace, is_own_folder, read_regular_file
from stepscope.common.formatting import format_bytes, printable
from stepscope.host.child_process import start_module
from stepscope.host.process_limits import end_with_stdin, limit_process
from stepscope.memory.snapshots.load import REMEDY, SnapshotError, load
from stepscope.memory.snapshots.stacks import MAX_TEXT_CHARS
from stepscope.memory.snapshots.summary import SnapshotSummary, summarize

SCHEMA = 3
MAX_BYTES = 16 * 2**20  # Of an unpacked summary: 2000 stacks and ten histories are smaller.
MAX_LISTS = 400_000  # Lists and objects in a summary: each takes more memory than its text.
MAX_MEMORY = 4 * 10**9  # Bytes of address space: a file of 250 MB needs 2.2 GB of memory.
MAX_CPU_S = 120
MAX_RESULT_BYTES = 128 * 2**20
MAX_WALL_S = 600.0  # The process may have to wait for others on a busy machine.
POLL_S = 0.1
MAX_ERROR_CHARS = 600
MAX_FRAME_CHARS = 2 * MAX_TEXT_CHARS + 100  # of a frame: file name, line and function
_LONG_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|[,:\[]-?([0-9]{20})')  # skips strings


@dataclass(frozen=True, slots=True)
class SummaryFile:
    """Content of a summary file; `modified_ns` is the modification time of its snapshot."""

    schema: int
    modified_ns: int
    summary: SnapshotSummary


def summary_path(snapshot: Path) -> Path:
    """Return the path of a snapshot's summary in the same folder.

    >>> summary_path(Path("runs/one/snapshot-step-5.pickle")).name
    'snapshot-step-5.summary.json.gz'
    """
    return snapshot.with_name(f"{snapshot.name.removesuffix('.pickle')}.summary.json.gz")


def write_summary(path: Path, summary: SnapshotSummary, modified_ns: int) -> None:
    """Write a summary atomically. Raises OSError, and ValueError for one above the limits."""
    data = msgspec.json.encode(SummaryFile(SCHEMA, modified_ns, summary))
    _check_size(data)
    with atomic_replace(path, durable=False) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(gzip.compress(data, 4, mtime=0))


def read_summary(path: Path, file_size: int, modified_ns: int) -> SnapshotSummary | None:
    """Return the current summary of a snapshot; None if the file is absent, old or invalid."""
    try:
        with gzip.open(io.BytesIO(read_regular_file(path, MAX_BYTES))) as file:
            data = file.read(MAX_BYTES + 1)
        _check_size(data)
        found = msgspec.json.decode(data, type=SummaryFile)
    except (OSError, ValueError, RecursionError, EOFError, zlib.error):
        return None
    if (found.schema, found.modified_ns) != (SCHEMA, modified_ns):
        return None
    summary = found.summary
    return summary if summary.file_size == file_size and _is_consistent(summary) else None


def _check_size(data: bytes) -> None:
    """Raise ValueError for JSON that takes too much memory or has numbers above 64 bits."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    if data.count(b"[") + data.count(b"{") > MAX_LISTS:
        raise ValueError(f"must have at most {MAX_LISTS} lists")
    if any(match[1] for match in _LONG_NUMBER.finditer(data)):
        raise ValueError("must have numbers of at most 64 bits")


def _is_consistent(summary: SnapshotSummary) -> bool:
    """Return True if all indices are valid and the columns of a history have one length."""
    for one in summary.histories:
        lines = [one.live, one.before, one.rest, one.seconds, one.reserved]
        lines += [band.live for band in one.bands]
        columns = [one.peak_column, *one.ooms]
        columns += [column for span in one.spans for column in (span.first, span.last)]
        if any(line is not None and len(line) != len(one.columns) for line in lines):
            return False
        if any(not 0 <= column < len(one.columns) for column in columns):
            return False
        if any(not 0 <= span.label < len(summary.labels) for span in one.spans):
            return False
    parts = (part for memory in summary.devices for row in memory.rows for part in row.parts)
    if any(len(text) > MAX_FRAME_CHARS for text in summary.texts.values()):
        return False
    texts = summary.texts.keys()  # an unknown stack has no frames
    return all(texts >= set(frames) for frames in summary.stacks.values()) and all(
        part.state in (0, 1, 2) and part.size >= 0 for part in parts
    )


def main(arguments: Sequence[str]) -> int:
    """Write the summary of the first argument to the second; return the exit code."""
    snapshot, result = map(Path, arguments)
    limit_process(memory=MAX_MEMORY, cpu_s=MAX_CPU_S, file_bytes=MAX_RESULT_BYTES)
    try:
        modified_ns = snapshot.stat().st_mtime_ns
        write_summary(result, summarize(load(snapshot)), modified_ns)
    except MemoryError:
        return _fail(
            f"{snapshot.name}: needs more than {format_bytes(MAX_MEMORY)} of memory to open. "
            "Record fewer steps."
        )
    except (SnapshotError, OSError) as error:
        return _fail(str(error))
    except Exception as error:  # noqa: BLE001 - the page shows this one line
        what = f"{type(error).__name__}: {error}"[:200]
        return _fail(f"{snapshot.name}: cannot be summarized ({what}). {REMEDY}")
    return 0


def _fail(text: str) -> int:
    sys.stderr.write(printable(text) + "\n")
    return 1


class SnapshotLoadTask:
    """Opens one snapshot (`summary`: by `kept_summary`); call `poll` until it returns True.

    Not thread-safe. Raises OSError if the file cannot be read or no process can be started.
    """

    def __init__(self, path: Path, spare: Path, summary: SnapshotSummary | None = None) -> None:
        found = path.stat()
        self.path = path
        self.summary = summary
        self.error: str | None = None  # Why the file could not be opened, as a sentence.
        self._state = (found.st_size, found.st_mtime_ns)
        self._deadline = time.monotonic() + MAX_WALL_S
        self._result = _place(path, spare)
        self._process = None if summary is not None else _start(path, self._result)

    @property
    def done(self) -> bool:
        """True once `summary` or `error` is set."""
        return self.summary is not None or self.error is not None

    def poll(self) -> bool:
        """Update the progress and the result; return `done`."""
        process = self._process
        if self.done or process is None:
            return self.done
        code = process.poll()
        name = self.path.name
        if code is None and time.monotonic() > self._deadline:
            self.close()
            self.error = f"{name}: took more than {MAX_WALL_S:.0f} s. {REMEDY}"
        elif code == 0:
            self.close()
            self.summary = read_summary(self._result, *self._state)
            if self.summary is None:
                self.error = f"{name}: was changed while it was read. Open it again."
        elif code is not None:
            assert process.stderr is not None
            lines = process.stderr.read().decode(errors="replace").strip().splitlines()
            self.close()
            self.error = printable(_why(name, code, lines[-1:]))[:MAX_ERROR_CHARS]
        return self.done

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # waits for it and closes its pipes
                pass


def kept_summary(path: Path, spare: Path) -> SnapshotSummary | None:
    """Return the cached summary of a file, None without a current one. Raises OSError."""
    found = path.stat()
    return read_summary(_place(path, spare), found.st_size, found.st_mtime_ns)


def open_snapshot(path: Path, spare: Path) -> SnapshotSummary:
    """Return the summary of a snapshot; blocks. Raises SnapshotError and OSError.

    `spare` is a folder for the summary if the folder of the file is read-only.
    """
    opening = SnapshotLoadTask(path, spare, kept_summary(path, spare))
    try:
        while not opening.poll():
            time.sleep(POLL_S)
    finally:
        opening.close()
    if opening.summary is None:
        raise SnapshotError(opening.error)
    return opening.summary


def _place(path: Path, spare: Path) -> Path:
    if is_own_folder(path.parent) and os.access(path.parent, os.W_OK):
        return summary_path(path)
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return spare / f"{name}.summary.json.gz"


def _start(path: Path, result: Path) -> subprocess.Popen[bytes]:
    return start_module(
        "stepscope.memory.snapshots.open_snapshot",
        (str(path.absolute()), str(result.absolute())),
        stdin=subprocess.PIPE,  # closed with this process: the child then ends
        # One thread is enough, and others would count against the limit of memory.
        OPENBLAS_NUM_THREADS="1",
    )


def _why(name: str, code: int, words: list[str]) -> str:
    if code == -signal.SIGXCPU:
        return f"{name}: took more than {MAX_CPU_S} s to open. {REMEDY}"
    if code < 0:
        how = signal.strsignal(-code) or f"signal {-code}"
        return f"{name}: broke the process that opened it ({how}), as no snapshot does. {REMEDY}"
    return words[0] if words else f"{name}: could not be opened (exit code {code}). {REMEDY}"


if __name__ == "__main__":
    end_with_stdin()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # to free ten million objects one by one would take seconds
