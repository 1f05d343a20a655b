"""A measurement of collectives: torchrun and its ranks in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from trainer.collectives.plan import NCCL, Plan
from trainer.collectives.results import SCHEMA, new_result_path, write_result

LIMIT_S = 900.0
ERRORS_KEPT = 64 * 2**10
"""Bytes of the ranks' error output that are looked at for the reason of a bad end."""
LEAVE_S = 3.0
"""What torchrun gets to end its ranks, before all of them are killed."""
_PROJECT = Path(__file__).resolve().parents[2]


class MeasurementState(StrEnum):
    """How far a measurement is."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class MeasurementOutput:
    """What there is to show: the document so far, its name once it is kept, and what went wrong."""

    state: MeasurementState
    document: dict[str, Any]
    seconds: float
    name: str | None = None
    reason: str | None = None


class Measurement:
    """One measurement; every method may be called from any thread.

    What was measured is kept as a file in `root` / "collectives", also of one that was stopped.
    Raises OSError where torchrun cannot be started.
    """

    def __init__(self, plan: Plan, root: Path) -> None:
        self.plan = plan
        self._root = root
        self._rows: list[dict[str, Any]] = []
        self._machine: dict[str, Any] = {}
        self._created = time.time()
        self._began = time.monotonic()
        self._ended: MeasurementOutput | None = None
        self._whole = False
        self._stopping = False
        self._late = False
        self._errors = b""
        self._process = subprocess.Popen(
            [
                # torchrun, which ends with this process: the pipe ends then.
                *(sys.executable, "-m", "trainer.runners.agent", "--standalone"),
                *(f"--nproc-per-node={plan.ranks}", "-m", "trainer.collectives.rank"),
                plan.to_json(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=_PROJECT,
            env=_environment(plan),
            start_new_session=True,
            bufsize=0,
        )
        self._threads = [
            threading.Thread(target=target, name="stepscope-collectives", daemon=True)
            for target in (self._follow, self._take_errors)
        ]
        for thread in self._threads:
            thread.start()

    def output(self) -> MeasurementOutput:
        """Return what there is to show now."""
        seconds = time.monotonic() - self._began
        running = MeasurementOutput(MeasurementState.RUNNING, self._document("running"), seconds)
        return self._ended or running

    def running(self) -> bool:
        """Return True until the processes are gone."""
        return self._ended is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; say whether it has come."""
        self._threads[0].join(timeout_s)
        return not self.running()

    def stop(self, timeout_s: float = LEAVE_S + 2.0) -> None:
        """End the processes, if they still run, and wait until they are gone."""
        self._stopping = True
        if self.running():
            self._end()
        self._threads[0].join(timeout_s)

    def _document(self, status: str) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "created": self._created,
            "host": socket.gethostname(),
            "status": status,
            **asdict(self.plan),
            "machine": dict(self._machine),
            "rows": list(self._rows),
        }

    def _follow(self) -> None:
        timer = threading.Timer(LIMIT_S, self._end_late)
        timer.name, timer.daemon = "stepscope-collectives-limit", True
        timer.start()
        try:
            assert self._process.stdout is not None
            with os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as lines:
                for line in lines:
                    self._take(line)
        finally:
            timer.cancel()
            code = self._process.wait()
            self._threads[1].join(1.0)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._ended = self._end_of(code)

    def _take(self, line: bytes) -> None:
        try:
            content = json.loads(line)
        except ValueError:
            return  # something else that a library printed
        if not isinstance(content, dict):
            return
        if isinstance(content.get("machine"), dict):
            self._machine = content["machine"]
        if isinstance(content.get("result"), dict):
            self._rows.append(content["result"])
        self._whole = self._whole or content.get("end") is True

    def _end_of(self, code: int) -> MeasurementOutput:
        state, reason = MeasurementState.FINISHED, None
        if self._stopping and not self._whole:
            state = MeasurementState.STOPPED
        elif not self._whole:
            state, reason = MeasurementState.FAILED, self._why(code)
        document = self._document(state) | {"reason": reason}
        name = None
        if any("bus" in row for row in self._rows):
            try:
                path = new_result_path(self._root, self.plan.backend, self.plan.ranks)
                write_result(path, document)
                name = path.stem
            except (OSError, ValueError) as error:
                reason = f"The results could not be kept: {error}."
        return MeasurementOutput(
            state, document, time.monotonic() - self._began, name=name, reason=reason
        )

    def _why(self, code: int) -> str:
        if self._late:
            return f"It took longer than {LIMIT_S / 60:.0f} min and was ended. Measure fewer sizes."
        # torchrun's own summary follows after the error of the rank.
        lines = self._errors.decode(errors="replace").splitlines()
        said = [line.partition(": ")[2] for line in lines if line.startswith("[rank")]
        causes = [text for text in said if text and not text.startswith((" ", "Traceback"))]
        why = next(iter(causes), next(iter(reversed(lines)), ""))
        return f"torchrun ended with exit code {code}. {why[:300]}".strip()

    def _take_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._process.stderr.fileno(), 8192):
                self._errors = (self._errors + chunk)[-ERRORS_KEPT:]

    def _end_late(self) -> None:
        self._late = True
        self._end()

    def _end(self) -> None:
        """End torchrun and its ranks, each of which leads a session of its own."""
        try:
            launcher = psutil.Process(self._process.pid)
            processes = [*launcher.children(recursive=True), launcher]
        except psutil.Error:
            return
        with contextlib.suppress(psutil.Error):
            launcher.terminate()
        _, left = psutil.wait_procs(processes, timeout=LEAVE_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _environment(plan: Plan) -> dict[str, str]:
    found = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if plan.backend != NCCL:
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found
