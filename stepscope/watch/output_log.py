"""Tee the output of a script to `output.log` in its run folder.

`sys.stdout` and `sys.stderr` remain the same objects, with their encoding, buffering and file
descriptor. Only `write` and `flush` of the raw file object below are replaced. Output of C code and
child processes is not in the log.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.run import rank_file

LIMIT_BYTES = 8 * 2**20
"""Size at which `output.log` is rotated to `output.1.log`: the last 8 to 16 MiB are kept."""

BEGUN_S = 0.5  # Maximum delay of an incomplete line.


class OutputLog:
    """The log of one process, written immediately, so that a killed process loses nothing.

    Only an incomplete line of an unbuffered stream is delayed, to its end, a flush or BEGUN_S.
    There `print` writes a line in two parts, and a write to the log between them would merge lines
    of ranks that share a pipe more often. If a write fails, `failed` is called once, and the log
    ends. Raises OSError if the file cannot be created.
    """

    def __init__(
        self, path: Path, *, failed: Callable[[OSError], None], limit: int = LIMIT_BYTES
    ) -> None:
        self._path = path
        self._older = path.with_suffix(f".1{path.suffix}")
        self._failed = failed
        self._limit = limit
        self._file = self._open()
        self._size = 0
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._begun: threading.Thread | None = None
        self._on = True
        os.register_at_fork(after_in_child=self._leave)

    def keep(self, stream: Any) -> str | None:
        """Tee this text stream; return None, or the reason why it is not supported."""
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # none below an unbuffered stream (python -u)
        if not isinstance(raw, io.FileIO):
            return f"it is not a file but {type(stream).__name__}"
        write, in_parts = raw.write, raw is buffer

        def kept(data: Any, /) -> int | None:
            written = write(data)
            if written and self._on:
                some = bytes(memoryview(data).cast("B")[:written])
                self._waiting.append(some)
                if not in_parts or some[-1] in b"\r\n" or self._closed.is_set():
                    self.flush()
            return written

        flush = raw.flush

        def flushed() -> None:
            flush()
            if self._on:
                self.flush()

        raw.write = kept  # type: ignore[method-assign]
        raw.flush = flushed  # type: ignore[method-assign]
        if in_parts and self._begun is None:
            self._begun = threading.Thread(target=self._work, name="stepscope-output", daemon=True)
            self._begun.start()
        return None

    def flush(self) -> None:
        """Write the pending bytes, unless another thread is writing and so includes them."""
        # Never blocks, because a signal handler may print during a write of this thread.
        while self._waiting and self._writing.acquire(blocking=False):
            try:
                self._write(b"".join(self._waiting.popleft() for _ in range(len(self._waiting))))
            finally:
                self._writing.release()

    def close(self) -> None:
        """Write the incomplete line, and write later output immediately."""
        self._closed.set()
        if self._begun is not None:
            self._begun.join()
        self.flush()

    def _open(self) -> int:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._opened = os.fstat(file)
        return file

    def _work(self) -> None:
        while not self._closed.wait(BEGUN_S):
            self.flush()

    def _write(self, data: bytes) -> None:
        try:
            # After os.closerange(3, …) a file of the script may have the number. 1 µs.
            if not os.path.samestat(os.fstat(self._file), self._opened):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            left = memoryview(data)
            while left:  # a disk that becomes full writes a part first
                left = left[os.write(self._file, left) :]
            self._size += len(data)
            if self._size >= self._limit:
                os.replace(self._path, self._older)
                full, self._file = self._file, self._open()
                os.close(full)
                self._size = 0
        except OSError as error:
            self._on = False
            self._failed(error)

    def _leave(self) -> None:
        """Detach after a fork, in the child: two processes cannot rotate one file."""
        self._on, self._begun = False, None
        self._waiting.clear()
        self._closed, self._writing = threading.Event(), threading.Lock()


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
    atexit.register(log.close)
    for stream in ("stdout", "stderr"):
        reason = log.keep(getattr(sys, stream))
        if reason is not None:
            failed(f"The output on {stream} is not kept: {reason}.")
