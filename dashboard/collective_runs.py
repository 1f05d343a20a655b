"""The measurement of collectives of this server: one at a time, and the files of earlier ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from stepscope.run import RunError
from trainer.collectives.plan import Plan
from trainer.collectives.process import Measurement
from trainer.collectives.results import read_result, result_names


class CollectiveRuns:
    """One a server; every method may be called from any session's thread."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._last: Measurement | None = None

    def start(self, plan: Plan) -> None:
        """Measure. Raises RunError while a measurement is at work, OSError if it cannot start."""
        with self._lock:
            if self.running() is not None:
                raise RunError("Measure: one measurement at a time. Stop the other, or wait.")
            self._last = Measurement(plan, self._runs)

    def last(self) -> Measurement | None:
        """Return the last measurement of this server, None before the first."""
        return self._last

    def running(self) -> Measurement | None:
        """Return the measurement that is at work now."""
        last = self._last
        return last if last is not None and last.running() else None

    def names(self) -> list[str]:
        """Return the names of the files that are kept, newest first."""
        return result_names(self._runs)

    def read(self, name: str) -> dict[str, Any]:
        """Return a measurement that is kept. Raises ResultError."""
        return read_result(self._runs, name)

    def close(self) -> None:
        """End the measurement that is at work."""
        last = self._last
        if last is not None:
            last.stop()
