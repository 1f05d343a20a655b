"""A lesson in a child process: the program that the page shows, alone or as ranks of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

from trainer.lessons import Lesson
from trainer.runners.child_process import Child, ChildOutput, ChildState

OUTPUT_LIMIT = 64 * 2**10
"""Bytes of output that are kept; a lesson that prints more is ended."""


class LessonRun(Child):
    """One run of a lesson. Thread-safe. Raises OSError if the process cannot be started."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self._text = b""
        self._full = False
        super().__init__(
            [sys.executable, "-u", *lesson.arguments],
            limit_s=lesson.limit_s,
            env=_environment(lesson),
            stderr=subprocess.STDOUT,
        )

    def _now(self) -> ChildOutput:
        return self._output(ChildState.RUNNING)

    def _read(self, stream: IO[bytes]) -> None:
        with os.fdopen(os.dup(stream.fileno()), "rb", buffering=0) as output:
            while not self._full and (chunk := output.read(8192)):
                self._text += chunk
                self._full = len(self._text) > OUTPUT_LIMIT
        if self._full:
            self._text = self._text[:OUTPUT_LIMIT]
            self._end()

    def _result(self, code: int) -> ChildOutput:
        if self._stopping:
            return self._output(ChildState.STOPPED)
        reason = None
        if self._full:
            reason = f"It was ended because it printed more than {OUTPUT_LIMIT // 1024} KiB."
        elif self._late:
            reason = f"It was ended after {self.lesson.limit_s:.0f} s, its time limit."
        elif code != 0:
            reason = f"It ended with exit code {code}."
        return self._output(ChildState.FINISHED if reason is None else ChildState.FAILED, reason)

    def _output(self, state: ChildState, reason: str | None = None) -> ChildOutput:
        text = self._text.decode(errors="replace")
        return ChildOutput(state, self.seconds, text, reason=reason)


def _environment(lesson: Lesson) -> dict[str, str]:
    # The profiler's own log would stand between the lesson's lines.
    quiet = {"KINETO_LOG_LEVEL": "6"}
    if lesson.ranks > 1:
        quiet["OMP_NUM_THREADS"] = "1"  # else torchrun prints that it sets this
    return quiet | os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
