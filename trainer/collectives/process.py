"""A measurement of collectives: torchrun and its ranks in child processes."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from trainer.collectives.plan import NCCL, CollectivePlan
from trainer.collectives.results import SCHEMA, new_result_path, write_result
from trainer.launch_commands import ONE_MACHINE
from trainer.runners.child_process import Child, ChildOutput, ChildState

LIMIT_S = 900.0


class Measurement(Child):
    """One measurement, stopped ones included, saved in `root` / "collectives". Thread-safe.

    Raises OSError if torchrun cannot be started.
    """

    def __init__(self, plan: CollectivePlan, root: Path) -> None:
        self.plan = plan
        self._root = root
        self._rows: list[dict[str, Any]] = []
        self._machine: dict[str, Any] = {}
        self._created = time.time()
        self._complete = False
        self.saved: str | None = None
        """Name of the file of the results, once there is one."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if plan.backend != NCCL:
            env["CUDA_VISIBLE_DEVICES"] = ""
        # The agent runs torchrun, and ends when this process closes its stdin.
        agent = [sys.executable, "-m", "trainer.runners.agent"]
        super().__init__([*agent, *measuring_arguments(plan)], limit_s=LIMIT_S, env=env)

    def _now(self) -> ChildOutput:
        return ChildOutput(ChildState.RUNNING, self.seconds, answer=self._document("running"))

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

    def _result(self, code: int) -> ChildOutput:
        state, reason = ChildState.FINISHED, None
        if self._stopping and not self._complete:
            state = ChildState.STOPPED
        elif not self._complete:
            state, reason = ChildState.FAILED, self._why(code)
        document = self._document(state) | {"reason": reason}
        if any("bus" in row for row in self._rows):
            try:
                path = new_result_path(self._root, self.plan.backend, self.plan.ranks)
                write_result(path, document)
                self.saved = path.stem
            except (OSError, ValueError) as error:
                reason = f"The results could not be saved: {error}."
        return ChildOutput(state, self.seconds, answer=document, reason=reason)

    def _why(self, code: int) -> str:
        if self._late:
            return f"Ended after the limit of {LIMIT_S / 60:.0f} min. Measure fewer sizes."
        # torchrun prints a summary of its own after the error of the rank.
        lines = self._error_lines()
        texts = [line.partition(": ")[2] for line in lines if line.startswith("[rank")]
        causes = [text for text in texts if text and not text.startswith((" ", "Traceback"))]
        cause = (causes[:1] or lines[-1:] or [""])[0]
        return f"torchrun ended with exit code {code}. {cause[:300]}".strip()


def measuring_arguments(plan: CollectivePlan) -> list[str]:
    """Return torchrun's arguments for the ranks."""
    what = ("-m", "trainer.collectives.rank", msgspec.json.encode(plan).decode())
    return [*ONE_MACHINE, f"--nproc-per-node={plan.ranks}", *what]
