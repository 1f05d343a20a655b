"""A measurement of collectives: torchrun and its ranks in processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from trainer.collectives.plan import NCCL, Plan
from trainer.collectives.results import SCHEMA, new_result_path, write_result
from trainer.launch_commands import ONE_MACHINE
from trainer.runners.child_process import Child, ChildState

LIMIT_S = 900.0
LEAVE_S = 3.0
"""What torchrun gets to end its ranks, before all of them are killed."""


@dataclass(frozen=True, slots=True)
class MeasurementOutput:
    """What there is to show: the document so far, its name once it is kept, and what went wrong."""

    state: ChildState
    document: dict[str, Any]
    seconds: float
    name: str | None = None
    reason: str | None = None


class Measurement(Child):
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
        self._ended: MeasurementOutput | None = None
        self._whole = False
        super().__init__(
            [
                # torchrun, which ends with this process: the pipe ends then.
                *(sys.executable, "-m", "trainer.runners.agent"),
                *measuring_arguments(plan),
            ],
            name="stepscope-collectives",
            limit_s=LIMIT_S,
            env=_environment(plan),
        )

    def output(self) -> MeasurementOutput:
        """Return what there is to show now."""
        running = MeasurementOutput(ChildState.RUNNING, self._document("running"), self.seconds)
        return self._ended or running

    def running(self) -> bool:
        """Return True until the processes are gone."""
        return self._ended is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; say whether it has come."""
        self._threads[0].join(timeout_s)
        return not self.running()

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

    def _take(self, content: dict[str, Any]) -> None:
        if isinstance(content.get("machine"), dict):
            self._machine = content["machine"]
        if isinstance(content.get("result"), dict):
            self._rows.append(content["result"])
        self._whole = self._whole or content.get("end") is True

    def _over(self, code: int) -> None:
        state, reason = ChildState.FINISHED, None
        if self._stopping and not self._whole:
            state = ChildState.STOPPED
        elif not self._whole:
            state, reason = ChildState.FAILED, self._why(code)
        document = self._document(state) | {"reason": reason}
        name = None
        if any("bus" in row for row in self._rows):
            try:
                path = new_result_path(self._root, self.plan.backend, self.plan.ranks)
                write_result(path, document)
                name = path.stem
            except (OSError, ValueError) as error:
                reason = f"The results could not be kept: {error}."
        self._ended = MeasurementOutput(state, document, self.seconds, name=name, reason=reason)

    def _why(self, code: int) -> str:
        if self._late:
            return f"It took longer than {LIMIT_S / 60:.0f} min and was ended. Measure fewer sizes."
        # torchrun's own summary follows after the error of the rank.
        lines = self._errors.decode(errors="replace").splitlines()
        said = [line.partition(": ")[2] for line in lines if line.startswith("[rank")]
        causes = [text for text in said if text and not text.startswith((" ", "Traceback"))]
        why = next(iter(causes), next(iter(reversed(lines)), ""))
        return f"torchrun ended with exit code {code}. {why[:300]}".strip()

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


def measuring_arguments(plan: Plan) -> list[str]:
    """Return the arguments with which torchrun starts the ranks."""
    ranks = f"--nproc-per-node={plan.ranks}"
    return [*ONE_MACHINE, ranks, "-m", "trainer.collectives.rank", plan.to_json()]


def _environment(plan: Plan) -> dict[str, str]:
    found = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if plan.backend != NCCL:
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found
