"""Stores the last rows of killed runs and alerts crashes, whether or not a page is open."""

from __future__ import annotations

import logging
import threading

from dashboard.run_list import RunList
from stepscope.alerts.monitor import report_crash
from stepscope.alerts.settings import load
from stepscope.run import RunInfo, RunStatus
from stepscope.store.writer import ranks_with_unstored_rows, recover_ended

log = logging.getLogger(__name__)

PERIOD_S = 5.0
CLOSED_S = 5.0  # age of the heartbeat of an ended run at which its writer has closed the store


class CrashWatch:
    """One thread of the server, from `start` to `close`."""

    def __init__(self, run_list: RunList) -> None:
        self._run_list = run_list
        self._known: set[str] = set()
        self._stored: set[str] = set()  # ended runs without unstored rows
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

        Also stores the last rows of ended runs.
        """
        alerted = []
        for run in self._run_list.recent(PERIOD_S / 2).runs:
            if run.id not in self._stored and not run.status.live:
                self._store_last_rows(run)
            is_new_crash = run.status is RunStatus.CRASHED and run.id not in self._known
            if is_new_crash and self._alert(run):
                alerted.append(run.id)
        return alerted

    def _store_last_rows(self, run: RunInfo) -> None:
        """Store the rows that a killed process had not stored; no page writes them."""
        if run.status is RunStatus.CRASHED or run.heartbeat_age_s > CLOSED_S:
            recover_ended(run)
            if not ranks_with_unstored_rows(run):
                self._stored.add(run.id)

    def _alert(self, run: RunInfo) -> bool:
        """Alert the crash of a run; return True if it had to be alerted."""
        settings = load()
        self._known.add(run.id)
        try:
            return report_crash(run, settings)
        except Exception:  # one untrusted folder must not hide the other crashes
            log.warning("%s: its crash could not be alerted", run.id, exc_info=True)
            return False

    def _work(self) -> None:
        while not self._closing.wait(PERIOD_S):
            try:
                self.check_runs()
            except Exception:
                log.exception("could not check for crashed runs")
