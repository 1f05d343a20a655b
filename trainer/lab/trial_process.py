"""Starts the process of a sample, waits for it, and ends it: by time-out, or when asked to stop."""

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
LOG_BYTES = 20_000
"""End of the log in which the last line is looked for."""
RUN = "sample-"
"""Begins the name of the folder of the sample under way; it is removed after it."""
OF_SAMPLE = "STEPSCOPE_SAMPLE"
"""Variable in the environment of all processes of a sample: its folder."""
GONE_S = 5.0
"""Time that the system may need to end killed processes."""
LOOK_S = 0.02
PROJECT = Path(__file__).resolve().parents[2]


class SampleProcess:
    """One sample at a time. `stop` may be called from a signal handler of the same thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def take(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Measure in a fresh process; return what it answers, and `seconds`.

        What ends it otherwise becomes the `reason`. The result is void if `stopping` is set.
        """
        for former in self._folder.glob(f"{RUN}*/"):  # of a sweep that was killed
            shutil.rmtree(former, ignore_errors=True)
        run = Path(tempfile.mkdtemp(prefix=RUN, dir=self._folder)).resolve()
        began = time.monotonic()
        try:
            answer = self._answer({**job, "folder": str(run)}, timeout_s)
        finally:
            _end_all(str(run))
            shutil.rmtree(run, ignore_errors=True)
        return {**answer, "seconds": time.monotonic() - began}

    def stop(self) -> None:
        """End the sample under way; `take` returns then."""
        self.stopping = True
        if self._process is not None:
            _kill(self._process)

    def _answer(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        log = self._folder / LOG
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(open_for_append(log, truncate=True), "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer.lab.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                # A sample that fails is a finding of the lab's: nobody is called for it.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "STEPSCOPE_ALERTS": "off",
                    OF_SAMPLE: str(job["folder"]),
                },
                start_new_session=True,
                bufsize=0,
            )
        self._process = process
        if self.stopping:  # asked while the process was being started
            _kill(process)
        timer = threading.Timer(timeout_s, _kill, (process,))
        timer.name, timer.daemon = "lab-timeout", True
        timer.start()
        began = time.monotonic()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: its log says why
                process.stdin.write(json.dumps(job).encode() + b"\n")
            # stdin stays open until the answer: its end tells the child that its sweep is gone.
            text = process.stdout.read()
        finally:
            timer.cancel()
            self._process = None
            code = _end(process)
        if time.monotonic() - began >= timeout_s:
            return {"reason": f"Timed out after {format_duration(timeout_s)}."}
        return _parsed(text) or {"reason": _reason(code, log)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process, end what it has left running, and return its exit code."""
    # Before its number is given back: until then no other group can have it.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _kill(process)
    with process:  # closes its pipes
        return process.wait()


def _end_all(run: str) -> None:
    """Kill what a sample has started, and wait until it is gone.

    torchrun and its ranks lead sessions of their own, and are nobody's children once the sample's
    process is gone: the environment tells whose they are.
    """
    until, left = time.monotonic() + GONE_S, _started_by(run)
    while left and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(LOOK_S)
        left = {*filter(_is_there, left)} | _started_by(run)


def _started_by(run: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone, or of another user
            if process.environ().get(OF_SAMPLE) == run:
                found.add(process)
    return found


def _is_there(process: psutil.Process) -> bool:
    """Say whether a process still runs: one that ends has no environment before it is gone."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _reason(code: int, log: Path) -> str:
    """Say how a process ended that gave no answer."""
    if code == -signal.SIGKILL:
        return (
            "The process was killed (SIGKILL), usually because host memory ran out. Use a "
            "smaller batch or model."
        )
    if code < 0:
        return f"Its process was ended by {signal.Signals(-code).name}. {_last_line(log)}".strip()
    return f"Its process ended with exit code {code}. {_last_line(log)}".strip()


def _last_line(log: Path) -> str:
    lines = terminal_text(read_tail(log, LOG_BYTES)).strip().splitlines()
    return lines[-1][:300] if lines else ""
