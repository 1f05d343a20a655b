"""Stores the last rows of killed runs and alerts crashes, whether or not a page is open."""

from __future__ import annotations

import logging
import sys
import threading

from dashboard.run_index import RunIndex
from stepscope.alerts.monitor import report_crash
from stepscope.alerts.settings import AlertSettings, load
from stepscope.run import RunInfo, RunStatus
from stepscope.store.recovery import ranks_with_unstored_rows, recover_ended

log = logging.getLogger(__name__)

PERIOD_S = 5.0
CLOSED_S = 5.0  # age of the heartbeat of an ended run at which its writer has closed the store


class CrashWatch:
    """One thread of the server, from `start` to `close`."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._known: set[str] = set()
        self._stored: set[str] = set()  # ended runs without unstored rows
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

    def check_runs(self) -> list[str]:
        """Alert runs that crashed since the last call; return the ids of alerted runs.

        Also stores the last rows of ended runs. What fails is tried again by the next call.
        """
        runs = self._index.recent(PERIOD_S / 2).runs
        for run in runs:
            if run.id not in self._stored and not run.status.live:
                self._store_last_rows(run)
        crashed = [
            run for run in runs if run.status is RunStatus.CRASHED and run.id not in self._known
        ]
        if not crashed:
            return []
        settings = load()
        if settings.problem is not None:
            self._warn("stepscope: alerts: %s", settings.problem)
        return [run.id for run in crashed if self._alert(run, settings)]

    def _store_last_rows(self, run: RunInfo) -> None:
        """Store the rows that a killed process had not stored; no page writes them."""
        if run.status is RunStatus.CRASHED or run.heartbeat_age_s > CLOSED_S:
            recover_ended(run)
            if not ranks_with_unstored_rows(run):
                self._stored.add(run.id)

    def _alert(self, run: RunInfo, settings: AlertSettings) -> bool:
        """Alert the crash of a run; return True if it had to be alerted."""
        try:
            notifier = report_crash(run, settings)
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
                self.check_runs()
            except Exception:
                log.exception("could not check for crashed runs")
