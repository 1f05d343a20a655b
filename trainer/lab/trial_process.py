"""Runs the child process of a trial, with a time limit, and stops it on request."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from stepscope.common.files import open_for_append, read_tail
from stepscope.common.formatting import format_duration, terminal_text

LOG = "sample.log"
MAX_LOG_BYTES = 20_000
"""End of the log that is searched for the last line."""
RUN = "sample-"
"""Prefix of the run folder of the current trial, which is removed after it."""
OF_SAMPLE = "STEPSCOPE_SAMPLE"
"""Environment variable of all processes of a trial: its folder."""
KILL_TIMEOUT_S = 5.0
POLL_S = 0.02
PROJECT = Path(__file__).resolve().parents[2]


class TrialProcess:
    """Runs one trial at a time. `stop` may be called from a signal handler of the same thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def take(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Measure in a new process; return its answer, or a `reason`, and `seconds`.

        The result is invalid if `stopping` is set.
        """
        for former in self._folder.glob(f"{RUN}*/"):  # of a process that was killed
            shutil.rmtree(former, ignore_errors=True)
        run = Path(tempfile.mkdtemp(prefix=RUN, dir=self._folder)).resolve()
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
        if self._process is not None:
            _kill(self._process)

    def _answer(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        log = self._folder / LOG
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "STEPSCOPE_ALERTS": "off",  # a trial that fails is a result
            OF_SAMPLE: str(job["folder"]),
        }
        with open(open_for_append(log, truncate=True), "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer.lab.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        self._process = process
        if self.stopping:  # set while the process was starting
            _kill(process)
        timer = threading.Timer(timeout_s, _kill, (process,))
        timer.daemon = True
        timer.start()
        began = time.monotonic()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended; its log has the reason
                process.stdin.write(json.dumps(job).encode() + b"\n")
            # stdin stays open until the answer: closing it ends the child.
            text = process.stdout.read()
        finally:
            timer.cancel()
            self._process = None
            # Kill the group before wait() releases its id for reuse.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _kill(process)
            with process:  # closes the pipes
                code = process.wait()
        if time.monotonic() - began >= timeout_s:
            return {"reason": f"Timed out after {format_duration(timeout_s)}."}
        with contextlib.suppress(ValueError):
            answer = json.loads(text)
            if isinstance(answer, dict) and answer:
                return answer
        return {"reason": _reason(code, log)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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


def _reason(code: int, log: Path) -> str:
    """Return how a process without an answer ended."""
    if code == -signal.SIGKILL:
        return (
            "The process was killed (SIGKILL), usually because host memory ran out. Use a "
            "smaller batch or model."
        )
    lines = terminal_text(read_tail(log, MAX_LOG_BYTES)).strip().splitlines()
    last = lines[-1][:300] if lines else ""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"Its process ended {how}. {last}".strip()
