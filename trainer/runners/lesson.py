"""A lesson in a child process: its output so far, and how it ended.

The file that the page shows is the program that runs: `python trainer/lessons/NAME.py`, or for a
lesson of several processes torchrun. It ends at its time limit, when it prints too much, and when
it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

from trainer.lessons import Lesson
from trainer.runners.child_process import ChildState

OUTPUT_LIMIT = 64 * 2**10
"""Bytes of output that are kept; a lesson that prints more is ended."""
_LOOK_S = 0.2
"""Seconds between two looks at the clock while the child prints nothing."""


@dataclass(frozen=True, slots=True)
class LessonOutput:
    """What a lesson has printed, for how many seconds it ran, and the reason of a bad end."""

    state: ChildState
    text: str
    seconds: float
    reason: str | None = None


class LessonRun:
    """One run of a lesson; every method may be called from any thread.

    Raises OSError where the child cannot be started.
    """

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self._chunks: list[bytes] = []
        self._ended: tuple[ChildState, str | None] | None = None
        self._stopping = False
        self._began = time.monotonic()
        self._seconds = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-u", *lesson.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(lesson),
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._follow, name="stepscope-lesson", daemon=True)
        self._thread.start()

    def output(self) -> LessonOutput:
        """Return what there is to show now."""
        ended, text = self._ended, b"".join(self._chunks).decode(errors="replace")
        if ended is None:
            return LessonOutput(ChildState.RUNNING, text, time.monotonic() - self._began)
        return LessonOutput(ended[0], text, self._seconds, ended[1])

    def running(self) -> bool:
        """Return True until the child is gone."""
        return self._ended is None

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the child, if it still runs, and wait until it is gone."""
        self._stopping = True
        if self._ended is None:
            self._kill()
        self._thread.join(timeout_s)

    def _follow(self) -> None:
        reason = self._read()
        if reason is not None:
            self._kill()
        code = self._process.wait()
        self._kill()  # what it may have started and left behind
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._seconds = time.monotonic() - self._began
        if self._stopping:
            self._ended = (ChildState.STOPPED, None)
        elif reason is not None:
            self._ended = (ChildState.FAILED, reason)
        elif code != 0:
            self._ended = (ChildState.FAILED, f"It ended with exit code {code}.")
        else:
            self._ended = (ChildState.FINISHED, None)

    def _read(self) -> str | None:
        """Take the output until the child has ended; return why it must end before that."""
        assert self._process.stdout is not None
        pipe, size = self._process.stdout.fileno(), 0
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while time.monotonic() - self._began < self.lesson.limit_s:
                if not selector.select(_LOOK_S):
                    # A grandchild may hold the pipe open: the child's own end counts.
                    if self._process.poll() is not None:
                        return None
                    continue
                chunk = os.read(pipe, 8192)
                if not chunk:
                    return None
                self._chunks.append(chunk[: OUTPUT_LIMIT - size])
                size += len(chunk)
                if size > OUTPUT_LIMIT:
                    return f"It was ended because it printed more than {OUTPUT_LIMIT // 1024} KiB."
        return f"It was ended after {self.lesson.limit_s:.0f} s, its time limit."

    def _kill(self) -> None:
        for rank in self._ranks():
            with contextlib.suppress(psutil.Error):
                rank.kill()
        # The group has the child's number as long as one of its processes is there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ranks(self) -> list[psutil.Process]:
        """Return the processes that torchrun has started: each leads a session of its own."""
        if self.lesson.ranks == 1:
            return []
        try:
            found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
            return found
        except psutil.Error:  # torchrun has ended, and its ranks before it
            return []


def _environment(lesson: Lesson) -> dict[str, str]:
    # The profiler's own log would stand between the lesson's lines.
    quiet = {"KINETO_LOG_LEVEL": "6"}
    if lesson.ranks > 1:
        quiet["OMP_NUM_THREADS"] = "1"  # else torchrun says that it sets this
    return quiet | os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
