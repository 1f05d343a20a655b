"""A memory estimate in a child process of the page's server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.runners.child_process import Child, ChildOutput, ChildState

LIMIT_S = 600.0


class PredictionRun(Child):
    """One estimate, with `largest` also the search for the largest batch. Thread-safe.

    Raises OSError if the process cannot be started.
    """

    def __init__(self, config: RunConfig, root: Path, *, largest: bool = False) -> None:
        self.config = config
        self.largest = largest
        self._last: dict[str, Any] = {"progress": "Starting a process"}
        job = {
            "config": config.to_dict(),
            "runs": str(root.resolve()),
            "largest": largest,
            "probe": largest,
        }
        super().__init__(
            [sys.executable, "-m", "trainer.memory_estimate.job"],
            limit_s=LIMIT_S,
            first_line=json.dumps(job).encode() + b"\n",
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
        return ChildOutput(ChildState.FAILED, self.seconds, reason=self._why(code))

    def _why(self, code: int) -> str:
        reason = self._last.get("reason")
        if isinstance(reason, str):
            return reason
        if self._late:
            return f"It took longer than {LIMIT_S:.0f} s and was ended."
        last = " ".join(self._error_lines()[-1:])
        return f"Its process ended with exit code {code}. {last[:300]}".strip()
