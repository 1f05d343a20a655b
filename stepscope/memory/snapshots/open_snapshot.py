"""Open a snapshot file of unknown origin, once, in a child process with limits.

`python -m stepscope.memory.snapshots.open_snapshot` is that child. It writes a summary, which is
kept in the folder of the file, or in a spare folder where that one cannot be written.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_replace, is_own_folder, read_regular_file
from stepscope.common.formatting import format_bytes, printable
from stepscope.common.limited_process import end_with_stdin, limit_process
from stepscope.memory.snapshots.load import REMEDY, SnapshotError, load
from stepscope.memory.snapshots.summary import SnapshotSummary, summarize

SCHEMA = 1
BYTES_LIMIT = 16 * 2**20
"""A summary unpacked: 2000 stacks of 64 frames and ten histories have less."""
LISTS_LIMIT, VALUES_LIMIT = 400_000, 2_000_000
"""Lists in the text of a summary, and commas: each becomes an object before its form is checked."""
ITEMS_LIMIT = 400_000
"""Items of a list."""
_LEVEL = 4


def summary_path(snapshot: Path) -> Path:
    """Return where the summary of a snapshot is kept, beside it.

    >>> summary_path(Path("runs/one/snapshot-step-5.pickle")).name
    'snapshot-step-5.summary.json.gz'
    """
    return snapshot.with_name(f"{snapshot.name.removesuffix('.pickle')}.summary.json.gz")


def write_summary(path: Path, summary: SnapshotSummary, modified_ns: int) -> None:
    """Write a summary in one piece; `modified_ns` is its snapshot's time of change.

    Raises OSError, and ValueError where it is so large that `read_summary` would not read it.
    """
    content = {"schema": SCHEMA, "modified_ns": modified_ns, "summary": _plain(summary)}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    data = text.encode()
    _check_size(data)
    with atomic_replace(path, durable=False) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(gzip.compress(data, _LEVEL, mtime=0))


def read_summary(path: Path, file_size: int, modified_ns: int) -> SnapshotSummary | None:
    """Return the summary of the snapshot that has this size and time of change.

    None where there is none, it is of another state of the file, or it is not one of ours: it can
    be made again.
    """
    try:
        content = json.loads(_unpacked(path))
        if content["schema"] != SCHEMA or content["modified_ns"] != modified_ns:
            return None
        summary = _made(SnapshotSummary, content["summary"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, EOFError, zlib.error):
        return None
    assert isinstance(summary, SnapshotSummary)
    return summary if summary.file_size == file_size and _coherent(summary) else None


def _unpacked(path: Path) -> bytes:
    """Raises OSError for a link or pipe, ValueError where too much comes out."""
    data = read_regular_file(path, BYTES_LIMIT)
    with gzip.open(io.BytesIO(data)) as file:
        text = file.read(BYTES_LIMIT + 1)
    _check_size(text)
    return text


def _check_size(text: bytes) -> None:
    """Raise ValueError where parsing this JSON would take more memory or time than is due."""
    if len(text) > BYTES_LIMIT:
        raise ValueError(f"must have at most {BYTES_LIMIT} bytes")
    if text.count(b"[") + text.count(b"{") > LISTS_LIMIT or text.count(b",") > VALUES_LIMIT:
        raise ValueError(f"must have at most {LISTS_LIMIT} lists and {VALUES_LIMIT} values")


def _plain(value: Any) -> Any:
    """Return a value of dataclasses as lists: field names would be most of the file."""
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _made(kind: Any, value: Any) -> Any:
    """Return a value of this type made of lists. Raises ValueError where it does not fit."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None:
            return None
        (kind,) = [part for part in parts if part is not types.NoneType]
        return _made(kind, value)
    if origin is tuple:
        items = _list(value)
        return (
            tuple(items)
            if parts[0] in _PLAIN and _all(parts[0], items)
            else tuple(_made(parts[0], item) for item in items)
        )
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds, items = _fields(kind), _list(value)
        if len(items) != len(kinds):
            raise ValueError(f"{kind.__name__}: must have {len(kinds)} values, got {len(items)}")
        return kind(*map(_made, kinds, items))
    if kind is float and type(value) is int:
        value = float(value)
    if not _all(kind, [value]):
        raise ValueError(f"must be {kind.__name__}, got {type(value).__name__}")
    return value


_PLAIN = (int, float, str)


def _all(kind: type, values: list[Any]) -> bool:
    """Say whether all values have exactly this type, and numbers a size that can be."""
    if set(map(type, values)) - {kind}:
        return False
    if kind is int:
        return all(-(2**63) <= value < 2**63 for value in values)
    return kind is not float or all(map(math.isfinite, values))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > ITEMS_LIMIT:
        raise ValueError(f"must be a list of at most {ITEMS_LIMIT}, got {type(value).__name__}")
    return value


@functools.cache
def _fields(kind: Any) -> tuple[Any, ...]:
    """Return the types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return tuple(hints[field.name] for field in dataclasses.fields(kind))


def _coherent(summary: SnapshotSummary) -> bool:
    """Say whether every number of a stack or frame has one, and columns have one length."""
    stacks = [site.stack for site in summary.sites]
    for memory in summary.devices:
        stacks += [part.stack for row in memory.rows for part in row.parts]
    for one in summary.histories:
        stacks += [band.stack for band in one.bands] + [held.stack for held in one.at_peak]
        lines: list[tuple[float, ...]] = [one.live, one.before, one.rest]
        lines += [band.live for band in one.bands]
        lines += [line for line in (one.seconds, one.reserved) if line is not None]
        count = len(one.columns)
        if not 0 <= one.peak_column < count or any(len(line) != count for line in lines):
            return False
        ends = [span.first for span in one.spans] + [span.last for span in one.spans]
        if any(not 0 <= place < count for place in (*ends, *one.ooms)):
            return False
        if any(not 0 <= span.label < len(summary.labels) for span in one.spans):
            return False
    frames = [place for stack in summary.stacks for place in stack]
    return (
        len(summary.modules) == len(summary.stacks)
        and all(-1 <= stack < len(summary.stacks) for stack in stacks)
        and all(0 <= place < len(summary.texts) for place in frames)
        and all(
            part.state in (0, 1, 2) and part.size >= 0
            for memory in summary.devices
            for row in memory.rows
            for part in row.parts
        )
    )


MEMORY_LIMIT = 4 * 10**9
"""Bytes of address space: a file of 250 MB needs 2.2 GB of memory."""
CPU_LIMIT_S = 120
RESULT_LIMIT = 128 * 2**20


def main(arguments: Sequence[str]) -> int:
    """Do it; return the exit code."""
    snapshot, result = map(Path, arguments)
    limit_process(memory=MEMORY_LIMIT, cpu_s=CPU_LIMIT_S, file_bytes=RESULT_LIMIT)
    try:
        modified_ns = snapshot.stat().st_mtime_ns
        loaded = load(snapshot, progress=_say)
        write_summary(result, summarize(loaded), modified_ns)
    except MemoryError:
        return _fail(
            f"{snapshot.name}: needs more than {format_bytes(MEMORY_LIMIT)} of memory to open. "
            "Record fewer steps."
        )
    except (SnapshotError, OSError) as error:
        return _fail(str(error))
    except Exception as error:  # noqa: BLE001 - the page shows this one line
        what = f"{type(error).__name__}: {error}"[:200]
        return _fail(f"{snapshot.name}: cannot be summarized ({what}). {REMEDY}")
    return 0


def _say(read: int) -> None:
    sys.stdout.write(f"{read}\n")
    sys.stdout.flush()


def _fail(text: str) -> int:
    sys.stderr.write(printable(text) + "\n")
    return 1


TIME_LIMIT_S = 600.0
"""Wall time: the process may have to wait for others on a busy machine."""
POLL_S = 0.1
_ROOT = Path(__file__).parents[3]
_SENTENCE_LIMIT = 600


class SnapshotLoadTask:
    """One snapshot on its way; `poll` until `done`, from any thread, one at a time.

    `summary` is what `kept_summary` gave. Raises OSError where the file cannot be looked at or no
    process be started.
    """

    def __init__(self, path: Path, spare: Path, summary: SnapshotSummary | None = None) -> None:
        found = path.stat()
        self.path = path
        self.share = 0.0
        """Of the file that has been read."""
        self.summary = summary
        self.error: str | None = None
        """A sentence where the file could not be opened."""
        self._state = (found.st_size, found.st_mtime_ns)
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = time.monotonic() + TIME_LIMIT_S
        self._result = _place(path, spare)
        if self.summary is None:
            self._process = _start(path, self._result)

    @property
    def done(self) -> bool:
        """Say whether `summary` or `error` is there."""
        return self.summary is not None or self.error is not None

    def poll(self) -> bool:
        """Look how far it is; return `done`."""
        process = self._process
        if self.done or process is None:
            return self.done
        code = process.poll()
        assert process.stdout is not None
        said = process.stdout.read() or b""
        last = said.split()[-1:]
        if last and last[0].isdigit():
            self.share = min(1.0, int(last[0]) / max(1, self._state[0]))
        if code is None and time.monotonic() > self._deadline:
            self.close()
            self.error = f"{self.path.name}: took more than {TIME_LIMIT_S:.0f} s. {REMEDY}"
        elif code is not None:
            self._end(process, code)
        return self.done

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            _close(self._process)

    def _end(self, process: subprocess.Popen[bytes], code: int) -> None:
        assert process.stderr is not None
        words = process.stderr.read().decode(errors="replace").strip().splitlines()
        _close(process)
        if code == 0:
            self.summary = read_summary(self._result, *self._state)
            if self.summary is None:
                self.error = f"{self.path.name}: was changed while it was read. Open it again."
        else:
            self.error = printable(_why(self.path.name, code, words[-1:]))[:_SENTENCE_LIMIT]


def kept_summary(path: Path, spare: Path) -> SnapshotSummary | None:
    """Return the summary that is kept of a file as it is now, if any. Raises OSError."""
    found = path.stat()
    return read_summary(_place(path, spare), found.st_size, found.st_mtime_ns)


def open_snapshot(
    path: Path, spare: Path, progress: Callable[[float], None] = lambda share: None
) -> SnapshotSummary:
    """Return the summary of a snapshot, waiting for it. Raises SnapshotError and OSError.

    `spare` is a folder for it where that of the file cannot be written.
    """
    opening = SnapshotLoadTask(path, spare, kept_summary(path, spare))
    try:
        while not opening.poll():
            progress(opening.share)
            time.sleep(POLL_S)
    finally:
        opening.close()
    if opening.summary is None:
        raise SnapshotError(opening.error)
    return opening.summary


def _place(path: Path, spare: Path) -> Path:
    """Return where the summary is kept."""
    beside = summary_path(path)
    if is_own_folder(path.parent) and os.access(path.parent, os.W_OK):
        return beside
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return spare / f"{name}.summary.json.gz"


def _start(path: Path, result: Path) -> subprocess.Popen[bytes]:
    roots = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        # -P: a file of the working directory must not take the place of a module.
        [sys.executable, "-P", "-m", "stepscope.memory.snapshots.open_snapshot"]
        + [str(path.absolute()), str(result.absolute())],
        stdin=subprocess.PIPE,  # its end tells the child that this process is gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # One thread is enough, and others would count against the limit of memory.
        env={**os.environ, "PYTHONPATH": roots, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _why(name: str, code: int, words: list[str]) -> str:
    if code == -signal.SIGXCPU:
        return f"{name}: took more than {CPU_LIMIT_S} s to open. {REMEDY}"
    if code < 0:
        how = signal.strsignal(-code) or f"signal {-code}"
        return f"{name}: broke the process that opened it ({how}), as no snapshot does. {REMEDY}"
    return words[0] if words else f"{name}: could not be opened (exit code {code}). {REMEDY}"


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


if __name__ == "__main__":
    end_with_stdin()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # to free ten million objects one by one would take seconds
