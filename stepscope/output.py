"""Keeps what a script prints, in `output.log` of its run folder, without changing what is printed.

`sys.stdout` and `sys.stderr` stay the objects they are, with their encoding, buffering and file
descriptor; only the `write` of the raw file at their bottom is replaced, on that one object. What C
code and child processes write goes past it, to the terminal only.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.run import rank_file

LIMIT_BYTES = 8 * 2**20
"""When `output.log` is full it becomes `output.1.log`: the last 8 to 16 MiB are kept."""

# What a terminal obeys and does not show: colors, cursor moves, window titles.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class OutputLog:
    """The log of one process; written without a buffer, so that a killed process loses nothing.

    `failed` is told once when the log cannot be written; it ends there, and the script goes on.
    Raises OSError where the file cannot be made.
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
        self._rotating = threading.Lock()
        self._on = True
        os.register_at_fork(after_in_child=self._leave)

    def keep(self, stream: Any) -> str | None:
        """Keep from now on what this text stream writes; return why it cannot be kept, or None."""
        raw = getattr(stream, "buffer", None)
        raw = getattr(raw, "raw", raw)  # none below an unbuffered stream (python -u)
        if not isinstance(raw, io.FileIO):
            return f"it is no file of this process but {type(stream).__name__}"
        write = raw.write

        def kept(data: Any, /) -> int | None:
            written = write(data)
            if written and self._on:
                self._add(memoryview(data).cast("B")[:written])
            return written

        raw.write = kept  # type: ignore[method-assign]
        return None

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)

    def _add(self, data: memoryview) -> None:
        try:
            os.write(self._file, data)
            self._size += len(data)
            if self._size >= self._limit:
                self._rotate()
        except OSError as error:
            self._on = False
            self._failed(error)

    def _rotate(self) -> None:
        # Never waited for: a signal handler of this thread may print in the middle of it.
        if not self._rotating.acquire(blocking=False):
            return
        try:
            os.replace(self._path, self._older)
            fresh = self._open()
            # In one step, and to the same number: another thread may be about to write to it.
            os.dup2(fresh, self._file, inheritable=False)
            os.close(fresh)
            self._size = 0
        finally:
            self._rotating.release()

    def _leave(self) -> None:
        """In a forked child: two processes cannot rotate one file."""
        self._on = False


def keep_output(folder: Path, rank: int, failed: Callable[[str], None]) -> None:
    """Keep stdout and stderr of this process in `folder`; `failed` is told what cannot be kept."""
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


def terminal_text(text: str) -> str:
    """Return what stays on a terminal after this text: progress bars rewrite their line."""
    lines = _ESCAPES.sub("", text.replace("\r\n", "\n")).split("\n")
    kept = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return "\n".join(_CONTROLS.sub("", line) for line in kept)
