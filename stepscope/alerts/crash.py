"""Tells of a run that crashed: its process could not, so the dashboard's server does, once.

Only of runs of this host and user that were alive lately: an old folder alerts nobody.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time

from stepscope.alerts.config import AlertSettings
from stepscope.alerts.evaluator import ending
from stepscope.alerts.monitor import KIND
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.rules import RUN_FAILED, AlertRule, AlertState
from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunError, RunInfo, RunStatus, read_only_reason, read_run
from stepscope.run.rank_info import now_of
from stepscope.store import StoreError, StoreWriter, store_name

log = logging.getLogger(__name__)

MARKER = "crash-told"
"""In the run folder once somebody has told of it."""
YOUNG_S = 600.0
"""Age of the last sign of life up to which a crash is news: a server may be restarted meanwhile."""


def tell_crash(run: RunInfo, settings: AlertSettings) -> AlertNotifier | None:
    """Write the alert's event and have it delivered; None where there is nothing to tell.

    The caller closes what is returned. Of several servers, and several looks, one tells.
    """
    rule = next((rule for rule in settings.rules if rule.name == RUN_FAILED), None)
    if rule is None or not rule.enabled or not settings.on or not _is_news(run):
        return None
    if not _claim(run):
        return None
    text = ending(rule, run.reason, _step(run))
    _note(run, rule, text)
    actions = AlertNotifier(settings)
    actions.deliver(
        Alert(
            rule=rule.name,
            level=rule.level,
            state=AlertState.RAISED,
            text=text,
            value=None,
            metric=None,
            device=None,
            run=run.id,
            name=str(run.run_json.get("name")),
            folder=str(run.folder.absolute()),
            host=str(run.run_json.get("host")),
            rank=run.cause_rank,
            step=_step(run),
            ts=time.time(),
        )
    )
    return actions


def _is_news(run: RunInfo) -> bool:
    return (
        run.status is RunStatus.CRASHED
        and run.heartbeat_age_s < YOUNG_S
        and read_only_reason(run) is None
    )


def _claim(run: RunInfo) -> bool:
    """Say whether this call is the one that tells; the folder remembers it."""
    try:
        os.close(os.open(run.folder / MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError as error:  # read-only: the caller asks of a run once
        log.info("%s: cannot be marked as told: %s", run.id, error)
    return True


def _note(run: RunInfo, rule: AlertRule, text: str) -> None:
    """Put the event into the store, behind the last rows that the process had recorded."""
    data = {
        "rule": rule.name,
        "level": str(rule.level),
        "state": str(AlertState.RAISED),
        "value": None,
    }
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
                    text,
                    data,
                )
        finally:
            writer.close()
    except (RunError, StoreError, OSError, sqlite3.Error) as error:
        log.warning("%s: the alert of its crash is not among its events: %s", run.id, error)


def _step(run: RunInfo) -> int:
    step = run.run_json.get("step")
    return step if type(step) is int else 0
