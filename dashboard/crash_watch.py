"""Alerts each crashed run once, whether or not a page is open."""

from __future__ import annotations

import logging
import sys
import threading

from dashboard.run_index import RunIndex
from stepscope.alerts.monitor import tell_crash
from stepscope.alerts.settings import AlertSettings, load
from stepscope.run import RunInfo, RunStatus, restart_expected

log = logging.getLogger(__name__)

PERIOD_S = 5.0


class CrashWatch:
    """One thread of the server, from `start` to `close`."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._known: set[str] = set()
        self._logged: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepscope-crashes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; an alert under way is still sent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def look(self) -> list[str]:
        """Alert runs that crashed since the last call; return the ids of alerted runs.

        A crash whose alert fails is tried again by the next call.
        """
        crashed = [
            run
            for run in self._index.recent(PERIOD_S / 2).runs
            if run.status is RunStatus.CRASHED
            and run.id not in self._known
            and not restart_expected(run)
        ]
        if not crashed:
            return []
        settings = load()
        for text in settings.problems:
            self._warn("stepscope: alerts: %s", text)
        return [run.id for run in crashed if self._alert(run, settings)]

    def _alert(self, run: RunInfo, settings: AlertSettings) -> bool:
        """Alert the crash of a run; return True if it had to be alerted."""
        try:
            notifier = tell_crash(run, settings)
        except Exception:  # noqa: BLE001 - one untrusted folder must not hide the other crashes
            self._warn("%s: its crash could not be alerted", run.id)
            return False
        self._known.add(run.id)
        if notifier is not None:
            notifier.close()
        return notifier is not None

    def _warn(self, text: str, subject: str) -> None:
        """Log a warning once for each subject, with the exception in flight."""
        if subject not in self._logged:
            self._logged.add(subject)
            log.warning(text, subject, exc_info=sys.exc_info()[0] is not None)

    def _work(self) -> None:
        while not self._closing.wait(PERIOD_S):
            try:
                self.look()
            except Exception:
                log.exception("could not check for crashed runs")
