"""A measurement of collectives: torchrun and its ranks in child processes."""

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
TERMINATE_S = 3.0
"""Time for torchrun to end its ranks before all are killed."""


@dataclass(frozen=True, slots=True)
class MeasurementOutput:
    """The document so far; `name` is that of its file, `reason` what failed."""

    state: ChildState
    document: dict[str, Any]
    seconds: float
    name: str | None = None
    reason: str | None = None


class Measurement(Child):
    """One measurement, stopped ones included, saved in `root` / "collectives". Thread-safe.

    Raises OSError if torchrun cannot be started.
    """

    def __init__(self, plan: Plan, root: Path) -> None:
        self.plan = plan
        self._root = root
        self._rows: list[dict[str, Any]] = []
        self._machine: dict[str, Any] = {}
        self._created = time.time()
        self._ended: MeasurementOutput | None = None
        self._complete = False
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if plan.backend != NCCL:
            env["CUDA_VISIBLE_DEVICES"] = ""
        # The agent runs torchrun, and ends when this process closes its stdin.
        agent = [sys.executable, "-m", "trainer.runners.agent"]
        super().__init__(
            [*agent, *measuring_arguments(plan)],
            name="stepscope-collectives",
            limit_s=LIMIT_S,
            env=env,
        )

    def output(self) -> MeasurementOutput:
        """Return the current state and results."""
        running = MeasurementOutput(ChildState.RUNNING, self._document("running"), self.seconds)
        return self._ended or running

    def running(self) -> bool:
        """Return True until the processes have ended."""
        return self._ended is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return True if the measurement has ended."""
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
        self._machine = content.get("machine") or self._machine
        self._rows += [content["result"]] if "result" in content else []
        self._complete = self._complete or "end" in content

    def _over(self, code: int) -> None:
        state, reason, name = ChildState.FINISHED, None, None
        if self._stopping and not self._complete:
            state = ChildState.STOPPED
        elif not self._complete:
            state, reason = ChildState.FAILED, self._why(code)
        document = self._document(state) | {"reason": reason}
        if any("bus" in row for row in self._rows):
            try:
                path = new_result_path(self._root, self.plan.backend, self.plan.ranks)
                write_result(path, document)
                name = path.stem
            except (OSError, ValueError) as error:
                reason = f"The results could not be saved: {error}."
        self._ended = MeasurementOutput(state, document, self.seconds, name, reason)

    def _why(self, code: int) -> str:
        if self._late:
            return f"Ended after the limit of {LIMIT_S / 60:.0f} min. Measure fewer sizes."
        # torchrun prints a summary of its own after the error of the rank.
        lines = self._errors.decode(errors="replace").splitlines()
        texts = [line.partition(": ")[2] for line in lines if line.startswith("[rank")]
        causes = [text for text in texts if text and not text.startswith((" ", "Traceback"))]
        cause = (causes[:1] or lines[-1:] or [""])[0]
        return f"torchrun ended with exit code {code}. {cause[:300]}".strip()

    def _end(self) -> None:
        """End torchrun and its ranks, each of which leads its own session."""
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self._process.pid)
            processes = [*launcher.children(recursive=True), launcher]
            launcher.terminate()
            for process in psutil.wait_procs(processes, timeout=TERMINATE_S)[1]:
                with contextlib.suppress(psutil.Error):
                    process.kill()


def measuring_arguments(plan: Plan) -> list[str]:
    """Return torchrun's arguments for the ranks."""
    ranks = f"--nproc-per-node={plan.ranks}"
    return [*ONE_MACHINE, ranks, "-m", "trainer.collectives.rank", plan.to_json()]
