"""Tee the output of a script to `output.log` in its run folder.

`sys.stdout` and `sys.stderr` remain the same objects, with their encoding, buffering and file
descriptor. Only `write` of the raw file object below is replaced. Output of C code and
child processes is not in the log.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.run import rank_file

LIMIT_BYTES = 8 * 2**20
"""Size at which `output.log` is rotated to `output.1.log`: the last 8 to 16 MiB are kept."""


class OutputLog:
    """The log of one process, written immediately, so that a killed process loses nothing.

    If a write fails, `failed` is called once, and the log ends. Raises OSError if the file cannot
    be created.
    """

    def __init__(
        self, path: Path, *, failed: Callable[[OSError], None], limit: int = LIMIT_BYTES
    ) -> None:
        self._path = path
        self._older = path.with_suffix(f".1{path.suffix}")
        self._failed = failed
        self._limit = limit
        self._file, self._opened = self._open()
        self._size = 0
        self._writing = threading.RLock()  # a signal handler may print during a write
        self._on = True
        os.register_at_fork(after_in_child=self._leave)

    def keep(self, stream: Any) -> str | None:
        """Tee this text stream; return None, or the reason why it is not supported."""
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # none below an unbuffered stream (python -u)
        if not isinstance(raw, io.FileIO):
            return f"it is not a file but {type(stream).__name__}"
        write = raw.write

        def kept(data: Any, /) -> int | None:
            written = write(data)
            if written and self._on:
                with self._writing:
                    self._write(memoryview(data).cast("B")[:written])
            return written

        raw.write = kept  # type: ignore[method-assign]
        return None

    def _open(self) -> tuple[int, os.stat_result]:
        """Return the descriptor of a new log, and its state, which a file of the script lacks."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        return file, os.fstat(file)

    def _write(self, left: memoryview) -> None:
        try:
            # After os.closerange(3, …) a file of the script may have the number. 1 µs.
            if not os.path.samestat(os.fstat(self._file), self._opened):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._size += len(left)
            while left:  # a disk that becomes full writes a part first
                left = left[os.write(self._file, left) :]
            if self._size >= self._limit:
                self._size = 0
                os.replace(self._path, self._older)
                os.close(self._file)
                self._file, self._opened = self._open()
        except OSError as error:
            self._on = False
            self._failed(error)

    def _leave(self) -> None:
        """Detach after a fork, in the child: two processes cannot rotate one file."""
        self._on = False


def keep_output(folder: Path, rank: int, failed: Callable[[str], None]) -> None:
    """Tee stdout and stderr to `folder`; calls `failed` with a message for each failure."""
    try:
        log = OutputLog(
            folder / rank_file("output.log", rank),
            failed=lambda error: failed(f"The output is kept no longer: {error}."),
        )
    except OSError as error:
        failed(f"The output is not kept: {error}.")
        return
    for stream in ("stdout", "stderr"):
        reason = log.keep(getattr(sys, stream))
        if reason is not None:
            failed(f"The output on {stream} is not kept: {reason}.")
