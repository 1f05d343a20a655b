"""A prediction in a child process that the page's server owns: how far it is, and its answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainer.config import RunConfig

LIMIT_S = 600.0
LINE_LIMIT = 4 * 2**20
_PROJECT = Path(__file__).resolve().parents[2]


class PredictionState(StrEnum):
    """How far a prediction is."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PredictionOutput:
    """What there is to show: the progress, or the answer, or the reason why there is none."""

    state: PredictionState
    text: str = ""
    share: float = 0.0
    seconds: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


class PredictionRun:
    """One prediction; every method may be called from any thread.

    With `largest` it also looks for the largest batch, and measures throughput in short runs.
    Raises OSError where the child cannot be started.
    """

    def __init__(self, config: RunConfig, root: Path, *, largest: bool = False) -> None:
        self.config = config
        self.largest = largest
        self._output = PredictionOutput(PredictionState.RUNNING, "Starting a process")
        self._stopping = False
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.fit.job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=_PROJECT,
            start_new_session=True,
            bufsize=0,
        )
        job = {
            "config": config.to_dict(),
            "runs": str(root.resolve()),
            "largest": largest,
            "probe": largest,
        }
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the child that this process is gone.
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last words say why
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._errors: bytes = b""
        self._threads = [
            threading.Thread(target=target, name="stepscope-fit", daemon=True)
            for target in (self._follow, self._take_errors)
        ]
        for thread in self._threads:
            thread.start()

    def output(self) -> PredictionOutput:
        """Return what there is to show now."""
        return self._output

    def running(self) -> bool:
        """Return True until the child is gone."""
        return self._output.state is PredictionState.RUNNING

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the child, if it still runs, and wait until it is gone."""
        self._stopping = True
        if self.running():
            self._kill()
        self._threads[0].join(timeout_s)

    def _follow(self) -> None:
        timer = threading.Timer(LIMIT_S, self._kill)
        timer.name, timer.daemon = "stepscope-fit-limit", True
        timer.start()
        last: dict[str, Any] = {}
        try:
            assert self._process.stdout is not None
            with os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as lines:
                while line := lines.readline(LINE_LIMIT):
                    last = _parsed(line) or last
                    if "progress" in last:
                        self._output = PredictionOutput(
                            PredictionState.RUNNING,
                            str(last["progress"])[:200],
                            min(1.0, max(0.0, float(last.get("share") or 0.0))),
                            time.monotonic() - self._began,
                        )
        finally:
            timer.cancel()
            code = self._process.wait()
            self._kill()  # what it has left running
            self._threads[1].join(1.0)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._output = self._ended(code, last)

    def _ended(self, code: int, last: dict[str, Any]) -> PredictionOutput:
        seconds = time.monotonic() - self._began
        answer = last.get("answer")
        if isinstance(answer, dict):
            return PredictionOutput(PredictionState.FINISHED, seconds=seconds, answer=answer)
        if self._stopping:
            return PredictionOutput(PredictionState.STOPPED, seconds=seconds)
        reason = last.get("reason")
        if not isinstance(reason, str):
            words = self._errors.decode(errors="replace").strip().splitlines()[-1:]
            reason = f"Its process ended with exit code {code}. {' '.join(words)[:300]}".strip()
            if seconds >= LIMIT_S:
                reason = f"It took longer than {LIMIT_S:.0f} s and was ended."
        return PredictionOutput(PredictionState.FAILED, seconds=seconds, reason=reason)

    def _take_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._process.stderr.fileno(), 8192):
                self._errors = (self._errors + chunk)[-8192:]

    def _kill(self) -> None:
        # The group has the child's number as long as one of its processes is there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
