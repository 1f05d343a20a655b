"""The prediction of this server: one at a time, the last one is kept with its answer."""

from __future__ import annotations

import threading
from pathlib import Path

from stepscope.run import RunError
from trainer.config import RunConfig
from trainer.runners.estimate_process import PredictionRun


class FitRuns:
    """One a server; every method may be called from any session's thread."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._last: PredictionRun | None = None

    def start(self, config: RunConfig, *, largest: bool) -> None:
        """Predict. Raises RunError while one is at work, OSError if it cannot start."""
        with self._lock:
            if self.running() is not None:
                raise RunError("Fit: one prediction at a time. Stop the other, or wait for it.")
            self._last = PredictionRun(config, self._runs, largest=largest)

    def last(self) -> PredictionRun | None:
        """Return the last prediction, None before the first and once it was dropped."""
        return self._last

    def running(self) -> PredictionRun | None:
        """Return the prediction that is at work now."""
        last = self._last
        return last if last is not None and last.running() else None

    def measuring(self) -> bool:
        """Return True while short runs may be measured, which a training would disturb."""
        running = self.running()
        return running is not None and running.largest

    def drop(self) -> None:
        """Forget the last prediction, and end it if it still runs."""
        with self._lock:
            last, self._last = self._last, None
        if last is not None:
            last.stop()

    def close(self) -> None:
        """End the prediction that is at work."""
        self.drop()
