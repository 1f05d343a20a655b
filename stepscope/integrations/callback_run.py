"""Run of a trainer's callback: begins and ends with the training, or joins an open run.

Under `stepscope watch`, or after `stepscope.init` in the script, the callback adds its values to
that run and leaves it open. A watched run has loss, learning rate and gradient norm of every step:
a trainer's means over several steps are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope import tracker
from stepscope.run import RunStatus
from stepscope.run.status import outcome
from stepscope.session.stop import handlers_wait

_HOOKED = ("train/loss", "train/lr", "train/grad_norm")


class CallbackRun:
    """One training of a trainer; calls before `begin` and after `end` do nothing."""

    def __init__(self, name: str | None, runs: Path | str | None) -> None:
        self._name = name
        self._runs = runs
        self._tracker: tracker.Tracker | None = None
        self._owned = False
        self._stopped = False

    def begin(self, config: Mapping[str, Any], step: int, **run_info: Any) -> None:
        """Start or join a run that continues after `step`; `run_info` goes into run.json."""
        self.end(RunStatus.FAILED, "Training ended early: an exception left the trainer.")
        before = tracker.current()
        self._tracker = tracker.init(self._name, runs=self._runs, config=config)
        self._owned = self._tracker is not before
        self._stopped = False
        session = self._tracker.session
        if session is not None:
            session.recorder.describe(**run_info)
            if self._owned:
                session.recorder.step = step
                session.recorder.describe(first_step=step)

    def step(self, values: Mapping[str, Any], *, may_catch: bool) -> bool:
        """Record one optimizer step and execute commands; return True if the trainer must stop.

        A stop command raises KeyboardInterrupt, which is caught only with `may_catch`: a single
        rank that stops would leave the other ranks blocked for ever.
        """
        if self._tracker is not None:
            try:
                self._tracker.step(self._ours(values))
            except KeyboardInterrupt:
                if not may_catch:
                    raise
                self._stopped = True
        return self._stopped

    def log(self, values: Mapping[str, Any]) -> None:
        values = self._ours(values)
        if self._tracker is not None and values:
            self._tracker.log(values)

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch, counted from 1."""
        if self._tracker is not None:
            self._tracker.epoch = epoch

    def restart_clock(self) -> None:
        """Exclude the time since the last step, such as a validation, from the step time."""
        if self._tracker is not None and self._tracker.session is not None:
            self._tracker.session.recorder.restart_clock()

    def work(self) -> None:
        """Record work without a step, such as a validation batch."""
        if self._tracker is not None and self._tracker.session is not None:
            self._tracker.session.recorder.activity += 1

    def end(self, status: RunStatus = RunStatus.FINISHED, reason: str | None = None) -> None:
        """End the run, unless it belongs to the script."""
        ended, self._tracker = self._tracker, None
        if ended is not None and self._owned:
            if self._stopped:
                status, reason = RunStatus.STOPPED, "Interrupted (Ctrl-C, or Stop on the page)."
            ended.close(status, reason)

    @handlers_wait()
    def fail(self, error: BaseException) -> None:
        """End the run with the exception of the training; keep its traceback."""
        ended = outcome(error)
        if self._owned and self._tracker is not None and self._tracker.session is not None:
            ended = self._tracker.session.failed(ended, error)
        self.end(ended.status, ended.reason)

    def _ours(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values without those that a watched run records itself."""
        if self._tracker is None or not self._tracker.watched:
            return values
        return {key: value for key, value in values.items() if key not in _HOOKED}
