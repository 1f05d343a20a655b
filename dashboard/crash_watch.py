"""Looks for runs that have crashed, whether or not a page is open, and has each alerted once."""

from __future__ import annotations

import logging
import threading

from dashboard.run_index import RunIndex
from stepscope.alerts.crash import tell_crash
from stepscope.alerts.settings import AlertSettings, load
from stepscope.run import RunInfo, RunStatus, restart_expected

log = logging.getLogger(__name__)

PERIOD_S = 5.0


class CrashWatch:
    """One thread of the server, from `start` to `close`."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._known: set[str] = set()
        self._said: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepscope-crashes", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End; an alert under way is still told."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def look(self) -> list[str]:
        """Alert what has crashed since the last look; return the ids of these runs."""
        crashed = [
            run
            for run in self._index.recent(PERIOD_S / 2).runs
            if run.status is RunStatus.CRASHED
            and run.id not in self._known
            and not restart_expected(run)
        ]
        self._known.update(run.id for run in crashed)
        settings = load() if crashed else None
        self._say(settings.problems if settings is not None else ())
        return [run.id for run in crashed if settings is not None and _tell(run, settings)]

    def _say(self, problems: tuple[str, ...]) -> None:
        """Log what is wrong with alerts.toml, each problem once."""
        for text in problems:
            if text not in self._said:
                self._said.add(text)
                log.warning("stepscope: alerts: %s", text)

    def _work(self) -> None:
        while not self._closing.wait(PERIOD_S):
            try:
                self.look()
            except Exception:
                log.exception("crashed runs could not be looked for")


def _tell(run: RunInfo, settings: AlertSettings) -> bool:
    """Have the crash of a run alerted; return True if there was something to tell."""
    try:
        notifier = tell_crash(run, settings)
    except Exception:  # one untrusted folder: alert the crashes of all other runs
        log.exception("%s: its crash could not be reported", run.id)
        return False
    if notifier is not None:
        notifier.close()
    return notifier is not None
