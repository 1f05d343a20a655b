"""Report the crash of a killed run once, by the dashboard's server.

Only runs of this host and user with a recent heartbeat are reported.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing

from stepscope.alerts.evaluator import AlarmChange, ending
from stepscope.alerts.monitor import KIND, event_data, make_alert
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.rules import RUN_FAILED, AlertState
from stepscope.alerts.settings import AlertSettings
from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunError, RunInfo, RunStatus, is_own
from stepscope.run.rank_info import now_of
from stepscope.store import StoreError, StoreWriter, store_name
from stepscope.store.blocks import Event

log = logging.getLogger(__name__)

MARKER = "crash-told"  # file in the run folder after the alert
YOUNG_S = 600.0
"""Age of the last heartbeat up to which a crash is reported; a server may restart meanwhile."""


def tell_crash(run: RunInfo, settings: AlertSettings) -> AlertNotifier | None:
    """Write the alert's event and deliver it; return the notifier, which the caller closes.

    Returns None without a new crash to report. Of several servers, and several calls, one reports.
    """
    rule = next((rule for rule in settings.rules if rule.name == RUN_FAILED), None)
    is_new = run.status is RunStatus.CRASHED and run.heartbeat_age_s < YOUNG_S
    if rule is None or not rule.enabled or settings.path is None or not is_new:
        return None
    if not is_own(run) or not _claim(run):
        return None
    step = int(run.run_json.get("step") or 0)
    change = AlarmChange(rule, AlertState.RAISED, "", ending(rule, run.reason, step), None)
    alert = make_alert(change, run.run_json, run.folder.absolute(), run.cause_rank, step)
    _store_event(run, alert)
    notifier = AlertNotifier(settings)
    notifier.deliver(alert)
    return notifier


def _claim(run: RunInfo) -> bool:
    """Return True if this call creates MARKER, or if the folder is read-only."""
    try:
        os.close(os.open(run.folder / MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError as error:  # the caller reports a run once
        log.info("%s: cannot be marked as reported: %s", run.id, error)
    return True


def _store_event(run: RunInfo, alert: Alert) -> None:
    """Store the event after the last rows that the process had recorded."""
    try:
        recover_ended(run)
        if os.path.lexists(run.folder / "rank0.ring"):  # an unreadable ring is kept
            return
        epoch = int(run.run_json.get("epoch") or 0)
        ts, data = now_of(run.run_json), event_data(alert)
        store = run.folder / store_name(0)
        with closing(StoreWriter(store, reopen=True)) as writer, writer.transaction():
            writer.add_event(Event(ts, alert.step, epoch, KIND, alert.text, data))
    except (RunError, StoreError, OSError, sqlite3.Error) as error:
        log.warning("%s: the event of its crash could not be stored: %s", run.id, error)
