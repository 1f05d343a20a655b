"""The lessons that were run on this server: one at a time, the last result of each is kept."""

from __future__ import annotations

import threading

from stepscope.run import RunError
from trainer.lessons import Lesson
from trainer.runners.lesson import LessonRun


class LessonRuns:
    """One a server; every method may be called from any session's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, LessonRun] = {}

    def start(self, lesson: Lesson) -> None:
        """Run this lesson. Raises RunError while one is running, OSError if it cannot start."""
        with self._lock:
            running = self.running()
            if running is not None:
                raise RunError(
                    f"Run: one lesson at a time, got a second while “{running.title}” runs. "
                    "Stop it, or wait for its end."
                )
            self._runs[lesson.name] = LessonRun(lesson)

    def of(self, name: str) -> LessonRun | None:
        """Return the last run of this lesson, None where it has not been run yet."""
        return self._runs.get(name)

    def running(self) -> Lesson | None:
        """Return the lesson that is running now."""
        return next((run.lesson for run in list(self._runs.values()) if run.running()), None)

    def close(self) -> None:
        """End the lesson that is running."""
        for run in list(self._runs.values()):
            run.stop()
