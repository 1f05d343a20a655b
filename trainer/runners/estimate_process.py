"""A prediction in a child process that the page's server owns: how far it is, and its answer."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.runners.child_process import Child, ChildState

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class PredictionOutput:
    """What there is to show: the progress, or the answer, or the reason why there is none."""

    state: ChildState
    text: str = ""
    share: float = 0.0
    seconds: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


class PredictionRun(Child):
    """One prediction; every method may be called from any thread.

    With `largest` it also looks for the largest batch, and measures throughput in short runs.
    Raises OSError where the child cannot be started.
    """

    def __init__(self, config: RunConfig, root: Path, *, largest: bool = False) -> None:
        self.config = config
        self.largest = largest
        self._output = PredictionOutput(ChildState.RUNNING, "Starting a process")
        self._last: dict[str, Any] = {}
        job = {
            "config": config.to_dict(),
            "runs": str(root.resolve()),
            "largest": largest,
            "probe": largest,
        }
        super().__init__(
            [sys.executable, "-m", "trainer.memory_estimate.job"],
            name="stepscope-fit",
            limit_s=LIMIT_S,
            first_line=json.dumps(job).encode() + b"\n",
        )

    def output(self) -> PredictionOutput:
        """Return what there is to show now."""
        return self._output

    def running(self) -> bool:
        """Return True until the child is gone."""
        return self._output.state is ChildState.RUNNING

    def _take(self, content: dict[str, Any]) -> None:
        self._last = content
        if "progress" in content:
            self._output = PredictionOutput(
                ChildState.RUNNING,
                str(content["progress"])[:200],
                min(1.0, max(0.0, float(content.get("share") or 0.0))),
                self.seconds,
            )

    def _over(self, code: int) -> None:
        answer, reason = self._last.get("answer"), None
        if isinstance(answer, dict):
            state = ChildState.FINISHED
        else:
            state, answer = ChildState.STOPPED if self._stopping else ChildState.FAILED, {}
            reason = None if self._stopping else self._why(code)
        self._output = PredictionOutput(state, seconds=self.seconds, answer=answer, reason=reason)

    def _why(self, code: int) -> str:
        reason = self._last.get("reason")
        if isinstance(reason, str):
            return reason
        if self._late:
            return f"It took longer than {LIMIT_S:.0f} s and was ended."
        words = self._errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"Its process ended with exit code {code}. {' '.join(words)[:300]}".strip()
