"""Child processes of the page: memory estimates and lessons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from stepscope.host.child_process import Child, ChildOutput, ChildState
from trainer.config import RunConfig
from trainer.lessons import Lesson

ESTIMATE_LIMIT_S = 600.0
PROJECT = Path(__file__).resolve().parents[2]


class PredictionRun(Child):
    """A memory estimate, with `largest` also the batch size finder. Thread-safe.

    Raises OSError if the process cannot be started.
    """

    def __init__(self, config: RunConfig, *, largest: bool = False) -> None:
        self.config = config
        self.largest = largest
        self._last: dict[str, Any] = {"progress": "Starting a process"}
        job = {"config": config.to_dict(), "largest": largest, "probe": largest}
        super().__init__(
            [sys.executable, "-m", "trainer.memory_estimate", "--job"],
            limit_s=ESTIMATE_LIMIT_S,
            first_line=json.dumps(job).encode() + b"\n",
            cwd=PROJECT,
        )

    def _now(self) -> ChildOutput:
        text = str(self._last.get("progress", ""))[:200]
        share = min(1.0, max(0.0, float(self._last.get("share") or 0.0)))
        return ChildOutput(ChildState.RUNNING, self.seconds, text, share)

    def _take(self, content: dict[str, Any]) -> None:
        self._last = content

    def _result(self, code: int) -> ChildOutput:
        answer = self._last.get("answer")
        if isinstance(answer, dict):
            return ChildOutput(ChildState.FINISHED, self.seconds, answer=answer)
        if self._stopping:
            return ChildOutput(ChildState.STOPPED, self.seconds)
        reason = self._last.get("reason")
        if reason is None and self._late:
            reason = f"It took longer than {ESTIMATE_LIMIT_S:.0f} s and was ended."
        elif reason is None:
            last = " ".join(self._error_lines()[-1:])
            reason = f"Its process ended with exit code {code}. {last[:300]}".strip()
        return ChildOutput(ChildState.FAILED, self.seconds, reason=reason)


class LessonRun(Child):
    """A run of a lesson. Thread-safe. Raises OSError if the process cannot be started."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self._text = b""
        # Kineto would log between the lesson's lines, torchrun that it sets the threads.
        env = {"KINETO_LOG_LEVEL": "6"} | ({"OMP_NUM_THREADS": "1"} if lesson.ranks > 1 else {})
        env |= os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-u", *lesson.arguments]
        super().__init__(
            command, limit_s=lesson.limit_s, env=env, stderr=subprocess.STDOUT, cwd=PROJECT
        )

    def _now(self) -> ChildOutput:
        return self._output(ChildState.RUNNING)

    def _read(self, stream: IO[bytes]) -> None:
        with os.fdopen(os.dup(stream.fileno()), "rb", buffering=0) as output:
            while chunk := output.read(8192):
                self._text += chunk

    def _result(self, code: int) -> ChildOutput:
        if self._stopping:
            return self._output(ChildState.STOPPED)
        reason = None
        if self._late:
            reason = f"It was ended after {self.lesson.limit_s:.0f} s, its time limit."
        elif code != 0:
            reason = f"It ended with exit code {code}."
        return self._output(ChildState.FINISHED if reason is None else ChildState.FAILED, reason)

    def _output(self, state: ChildState, reason: str | None = None) -> ChildOutput:
        text = self._text.decode(errors="replace")
        return ChildOutput(state, self.seconds, text, reason=reason)
