"""A child process of the page's server with a time limit, whose output is followed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import psutil

MAX_LINE_BYTES = 4 * 2**20
ERRORS_KEPT = 64 * 2**10
"""Bytes at the end of stderr that are searched for the reason of a failure."""
_PROJECT = Path(__file__).resolve().parents[2]


class ChildState(StrEnum):
    """The state of a child process."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ChildOutput:
    """The output of a child process so far, and the reason of a failure.

    `text` is what a lesson has printed or what an estimate does now, `share` (0 to 1) its progress.
    """

    state: ChildState
    seconds: float = 0.0
    text: str = ""
    share: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


class Child:
    """A process that prints one JSON object a line, of which `_take` gets each. Thread-safe.

    Raises OSError if the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limit_s: float,
        first_line: bytes = b"",
        env: Mapping[str, str] | None = None,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self._began = time.monotonic()
        self._ended: ChildOutput | None = None
        self._stopping = False
        self._late = False
        self._errors = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=_PROJECT,
            env=env,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        # The pipe stays open: the child ends when it is closed, with this process.
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last line says why
            self._process.stdin.write(first_line)
        self._timer = threading.Timer(limit_s, self._end_late)
        self._readers = [
            threading.Thread(target=read, args=(stream,))
            for read, stream in (
                (self._read, self._process.stdout),
                (self._read_errors, self._process.stderr),
            )
            if stream is not None
        ]
        self._waiter = threading.Thread(target=self._wait)
        for thread in (self._timer, *self._readers, self._waiter):
            thread.name, thread.daemon = "stepscope-child", True
            thread.start()

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    def output(self) -> ChildOutput:
        """Return the output so far."""
        return self._ended or self._now()

    def running(self) -> bool:
        """Return True until the process has ended and its output is complete."""
        return self._ended is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return True if the process has ended."""
        self._waiter.join(timeout_s)
        return not self.running()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the process if it still runs, and wait for that."""
        self._stopping = True
        if self.running():
            self._end()
        self._waiter.join(timeout_s)

    def _now(self) -> ChildOutput:
        """Return the output of the running process."""
        raise NotImplementedError

    def _take(self, content: dict[str, Any]) -> None:
        """Handle one line."""
        raise NotImplementedError

    def _result(self, code: int) -> ChildOutput:
        """Return the final output; the process has ended with this exit code."""
        raise NotImplementedError

    def _end(self) -> None:
        """Kill the process and all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                launcher = psutil.Process(self._process.pid)
                launcher.suspend()  # it starts no more: ranks lead sessions of their own
                for process in launcher.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        # The group has the child's number as long as one of its processes is there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end_late(self) -> None:
        self._late = True
        self._end()

    def _read(self, stream: IO[bytes]) -> None:
        with os.fdopen(os.dup(stream.fileno()), "rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                with contextlib.suppress(ValueError):  # something that a library has printed
                    content = json.loads(line)
                    if isinstance(content, dict):
                        self._take(content)

    def _read_errors(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(stream.fileno(), 8192):
                self._errors = (self._errors + chunk)[-ERRORS_KEPT:]

    def _error_lines(self) -> list[str]:
        return self._errors.decode(errors="replace").strip().splitlines()

    def _wait(self) -> None:
        code = self._process.wait()
        self._timer.cancel()
        Child._end(self)  # what it has left running
        for reader in self._readers:
            reader.join(2.0)  # a process outside of its group may hold the pipe
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._ended = self._result(code)
