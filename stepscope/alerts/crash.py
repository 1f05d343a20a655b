"""The alert of a crashed run, sent once by the dashboard's server in place of the killed process.

Only runs of this host and user with a recent heartbeat are reported.
"""

from __future__ import annotations

import logging
import os
import sqlite3

from stepscope.alerts.evaluator import AlarmChange, ending
from stepscope.alerts.monitor import KIND, event_data, make_alert
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.rules import RUN_FAILED, AlertState
from stepscope.alerts.settings import AlertSettings
from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunError, RunInfo, RunStatus, read_only_reason, read_run
from stepscope.run.rank_info import now_of
from stepscope.store import StoreError, StoreWriter, store_name

log = logging.getLogger(__name__)

MARKER = "crash-told"  # File in the run folder after the alert.
YOUNG_S = 600.0
"""Age of the last heartbeat up to which a crash is reported; a server may restart meanwhile."""


def tell_crash(run: RunInfo, settings: AlertSettings) -> AlertNotifier | None:
    """Write the alert's event and deliver it; return None if there is nothing to report.

    The caller closes what is returned. Of several servers, and several calls, one reports.
    """
    rule = next((rule for rule in settings.rules if rule.name == RUN_FAILED), None)
    if rule is None or not rule.enabled or settings.path is None or not _is_news(run):
        return None
    if not _claim(run):
        return None
    step = _step(run)
    change = AlarmChange(rule, AlertState.RAISED, "", ending(rule, run.reason, step), None)
    alert = make_alert(change, run.run_json, run.folder.absolute(), run.cause_rank, step)
    _note(run, alert)
    notifier = AlertNotifier(settings)
    notifier.deliver(alert)
    return notifier


def _is_news(run: RunInfo) -> bool:
    return (
        run.status is RunStatus.CRASHED
        and run.heartbeat_age_s < YOUNG_S
        and read_only_reason(run) is None
    )


def _claim(run: RunInfo) -> bool:
    """Return whether this call is the first, by creating MARKER."""
    try:
        os.close(os.open(run.folder / MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError as error:  # read-only: the caller asks of a run once
        log.info("%s: cannot be marked as told: %s", run.id, error)
    return True


def _note(run: RunInfo, alert: Alert) -> None:
    """Put the event into the store, behind the last rows that the process had recorded."""
    try:
        if recover_ended(run):
            run = read_run(run.folder)  # it has got further than it could say
        if os.path.lexists(run.folder / "rank0.ring"):  # it cannot be read, and is kept as it is
            return
        writer = StoreWriter(run.folder / store_name(0), reopen=True)
        try:
            with writer.transaction():
                epoch = run.run_json.get("epoch")
                writer.add_event(
                    now_of(run.run_json),
                    _step(run),
                    epoch if type(epoch) is int else 0,
                    KIND,
                    alert.text,
                    event_data(alert),
                )
        finally:
            writer.close()
    except (RunError, StoreError, OSError, sqlite3.Error) as error:
        log.warning("%s: the alert of its crash is not among its events: %s", run.id, error)


def _step(run: RunInfo) -> int:
    step = run.run_json.get("step")
    return step if type(step) is int else 0
