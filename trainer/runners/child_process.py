"""A child process of the page's server that prints what it found, a JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

LINE_LIMIT = 4 * 2**20
"""Bytes of a line that are read at once."""
ERRORS_KEPT = 64 * 2**10
"""Bytes at the end of its error output that are looked at for the reason of a bad end."""
_PROJECT = Path(__file__).resolve().parents[2]


class ChildState(StrEnum):
    """How far a child process is."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class Child:
    """A process that has a time limit; every method may be called from any thread.

    Whoever derives from it says what comes of a line and of the end, by `_take` and `_over`, both
    called in a thread of their own. Raises OSError where the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        limit_s: float,
        first_line: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._stopping = False
        self._late = False
        self._errors = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=_PROJECT,
            env=env,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the child that this process is gone.
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last words say why
            self._process.stdin.write(first_line)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target in (self._follow, self._take_errors)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._began

    def running(self) -> bool:
        """Return True until the process is gone, and what came of it is known."""
        raise NotImplementedError

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the process, if it still runs, and wait until it is gone."""
        self._stopping = True
        if self.running():
            self._end()
        self._threads[0].join(timeout_s)

    def _take(self, content: dict[str, Any]) -> None:
        """Take what a line says."""
        raise NotImplementedError

    def _over(self, code: int) -> None:
        """Keep what came of it; the process is gone, with this exit code."""
        raise NotImplementedError

    def _end(self) -> None:
        """End the process, and what it has started."""
        # The group has the child's number as long as one of its processes is there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _follow(self) -> None:
        timer = threading.Timer(self._limit_s, self._end_late)
        timer.name, timer.daemon = f"{self._name}-limit", True
        timer.start()
        try:
            assert self._process.stdout is not None
            with os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as lines:
                while line := lines.readline(LINE_LIMIT):
                    content = _parsed(line)
                    if content is not None:
                        self._take(content)
        finally:
            timer.cancel()
            code = self._process.wait()
            Child._end(self)  # what it has left running
            self._threads[1].join(1.0)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._over(code)

    def _take_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._process.stderr.fileno(), 8192):
                self._errors = (self._errors + chunk)[-ERRORS_KEPT:]

    def _end_late(self) -> None:
        self._late = True
        self._end()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None for something else that a library printed."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
