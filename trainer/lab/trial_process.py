"""Runs the child process of a trial, with a time limit, and stops it on request."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from stepscope.common.files import open_for_append, read_tail
from stepscope.common.formatting import format_duration, terminal_text
from trainer.runners.child_process import PROJECT, Child, ChildOutput, ChildState

LOG = "sample.log"
MAX_LOG_BYTES = 20_000  # End of the log that is searched for the last line.
RUN = "sample-"  # Prefix of the run folder of the current trial, which is removed after it.
OF_SAMPLE = "STEPSCOPE_SAMPLE"  # Environment variable of all processes of a trial: its folder.
KILL_TIMEOUT_S = 5.0
POLL_S = 0.02


class TrialProcess:
    """Runs one trial at a time in `folder`.

    `stop` may be called from a signal handler of the same thread.
    """

    def __init__(self, folder: Path = Path()) -> None:
        self.folder = folder
        self._trial: _Trial | None = None
        self.stopping = False

    def take(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Measure in a new process; return its answer, or a `reason`, and `seconds`.

        `stops` is set if the reason is the sweep's folder. The result is invalid if `stopping` is
        set.
        """
        for former in self.folder.glob(f"{RUN}*/"):  # of a process that was killed
            shutil.rmtree(former, ignore_errors=True)
        run = Path(tempfile.mkdtemp(prefix=RUN, dir=self.folder)).resolve()
        began = time.monotonic()
        try:
            answer = self._answer({**job, "folder": str(run)}, timeout_s)
        finally:
            _kill_started_by(str(run))
            shutil.rmtree(run, ignore_errors=True)
        return {**answer, "seconds": time.monotonic() - began}

    def stop(self) -> None:
        """Kill the current trial; `take` returns then."""
        self.stopping = True
        if self._trial is not None:
            self._trial.stop(0)

    def _answer(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._trial = trial = _Trial(job, self.folder / LOG, timeout_s)
        try:
            if not self.stopping:  # set while the process was starting
                trial.wait()
        finally:
            trial.stop()
        found = trial.output()
        return found.answer or {"reason": found.reason}


class _Trial(Child):
    """One `trainer.lab.trial`, whose stderr is the log."""

    def __init__(self, job: Mapping[str, Any], log: Path, timeout_s: float) -> None:
        self._answer: dict[str, Any] = {}
        self._log = log
        self._limit_s = timeout_s
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "STEPSCOPE_ALERTS": "off",  # a trial that fails is a result
            OF_SAMPLE: str(job["folder"]),
        }
        with open(open_for_append(log, truncate=True), "wb") as output:
            super().__init__(
                [sys.executable, "-m", "trainer.lab.trial"],
                limit_s=timeout_s,
                first_line=json.dumps(job).encode() + b"\n",
                env=environment,
                stderr=output,
                cwd=None,  # files of the user's own workload may be relative to it
            )

    def _end(self) -> None:
        # Ranks are left to `_kill_started_by`, which also waits until they have ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, content: dict[str, Any]) -> None:
        self._answer = content

    def _result(self, code: int) -> ChildOutput:
        if self._answer and not self._late:
            return ChildOutput(ChildState.FINISHED, self.seconds, answer=self._answer)
        return ChildOutput(ChildState.FAILED, self.seconds, reason=self._why(code))

    def _why(self, code: int) -> str:
        """Return how a process without an answer ended."""
        if self._late:
            return f"Timed out after {format_duration(self._limit_s)}."
        if code == -signal.SIGKILL:
            return (
                "The process was killed (SIGKILL), usually because host memory ran out. Use a "
                "smaller batch or model."
            )
        lines = terminal_text(read_tail(self._log, MAX_LOG_BYTES)).strip().splitlines()
        last = lines[-1][:300] if lines else ""
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"Its process ended {how}. {last}".strip()


def _kill_started_by(run: str) -> None:
    """Kill the processes of a trial and wait until they have ended.

    torchrun and its ranks lead their own sessions, and have no parent after the trial's process has
    ended; the environment identifies them.
    """
    until = time.monotonic() + KILL_TIMEOUT_S
    left = _started_by(run)
    while left and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        # A process that is ending has no environment any more.
        left = set(psutil.wait_procs(left, timeout=POLL_S)[1]) | _started_by(run)


def _started_by(run: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended, or of another user
            if process.environ().get(OF_SAMPLE) == run:
                found.add(process)
    return found
