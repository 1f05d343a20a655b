"""Evaluate alert rules on the rows that the writer thread stores.

Runs once a second in the writer thread, never blocks, and stops after an internal error. A change
becomes an event of kind `alert`, which `AlertNotifier` delivers. The crash of a killed run is
reported by the dashboard's server (`report_crash`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.alerts.evaluator import AlertChange, AlertEvaluator, AlertFacts, fill, is_loss
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.settings import NO_STEP, RUN_FAILED, RUN_FINISHED, AlertSettings, AlertState
from stepscope.common.formatting import number_name
from stepscope.common.stall_detector import StepGap
from stepscope.run import RunError, RunInfo, RunStatus, is_own
from stepscope.run.rank_info import UNREADABLE, RankExit, now_of, rank_numbers, read_run_json
from stepscope.run_setup import training_gpu
from stepscope.store import SeriesBlock, StoreError, StoreWriter, store_name
from stepscope.store.blocks import Event, QueueItem, Sample
from stepscope.store.recovery import recover_ended

log = logging.getLogger(__name__)

KIND, PROBLEM_KIND = "alert", "alerts_problem"  # Events: alerts, invalid entries of alerts.toml.
RANKS_S = 10.0  # interval of reading which GPUs the other ranks train on
STALE_S = 30.0  # age at which a GPU's value expires; the slowest tier is read every 10 s
KEYS = frozenset(
    {"gpu/mem_used", "gpu/mem_total", "gpu/throttle_reasons", "gpu/util", "memory/alloc_retries"}
)
"""Metrics of the default rules, besides losses."""

EventParts = tuple[str, str, dict[str, Any]]  # kind, text and data of an event
RunJson = Mapping[str, Any]
SeriesKey = tuple[str, str]  # source ("" for the process, a UUID for a GPU) and metric


class AlertMonitor:
    """Evaluates the alert rules of one process's run.

    `add` and `check` run in the writer thread, `ended` and `close` in the thread that closes the
    run.
    """

    def __init__(
        self,
        settings: AlertSettings,
        folder: Path,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._rank = rank
        self._clock = clock
        self._evaluator = AlertEvaluator(settings.rules)
        self._notifier = AlertNotifier(settings)
        self._keys = KEYS | {rule.metric for rule in settings.rules if rule.enabled}
        self._fresh: dict[SeriesKey, list[float]] = {}  # Values since the last evaluation.
        self._last: dict[SeriesKey, tuple[list[float], float]] = {}
        """The newest value of each series, and when it expires."""
        self._lost: dict[str, str] = {}  # why GPUs cannot be reached, by UUID
        self._trains_on: frozenset[str] = frozenset()
        self._trains_on_until = -math.inf
        # The other ranks read the same file.
        self._problem = settings.problem if rank == 0 else None
        if self._problem is not None:
            log.warning("stepscope: alerts: %s", self._problem)
        self._is_off = settings.path is None

    def add(self, block: SeriesBlock, items: Sequence[QueueItem]) -> None:
        """Add stored rows and events."""
        if self._is_off:
            return
        with self._guarded():
            for row, key in enumerate(block.keys):
                if key in self._keys or is_loss(key):
                    has_value = block.count[row] + block.odd[row] > 0
                    self._add_values("", key, block.mean[row][has_value].tolist())
            for item in items:
                if isinstance(item, Sample):
                    for key in self._keys & item.values.keys():
                        value = item.values[key]
                        self._add_values(item.source, key, [] if value is None else [value])
                elif isinstance(item, Event):
                    self._add_event(item)

    def check(
        self, run_json: RunJson, step: int, gap: StepGap | None, hang: str | None
    ) -> list[EventParts]:
        """Evaluate all rules; return the events to write. `hang` is why a job makes no step."""
        events: list[EventParts] = []
        if self._problem is not None:
            events.append((PROBLEM_KIND, self._problem, {}))
            self._problem = None
        if self._is_off:
            return events
        with self._guarded():
            facts = self._facts(run_json, step, gap)
            for change in self._evaluator.evaluate(facts):
                if change.rule.name == NO_STEP and change.state is AlertState.RAISED and hang:
                    change = replace(change, text=f"{change.text}. {hang}")
                is_gpu = change.source in facts.labels or change.source in facts.lost
                device = change.source if is_gpu else None
                events.append(self._report(change, run_json, step, device))
        return events

    def ended(
        self, run_json: RunJson, step: int, status: RunStatus, reason: str | None
    ) -> EventParts | None:
        """Return the event of a run's end; None without a rule, or if another rank failed first."""
        if self._is_off:
            return None
        with self._guarded():
            # A run of one process has no peers: its lost connection is to another service.
            has_peers = self._rank > 0 or (run_json.get("world_size") or 1) > 1
            of_a_peer = has_peers and RankExit(self._rank, 0.0, 0.0, reason).of_a_peer
            change = None
            if status is RunStatus.FAILED and not of_a_peer:
                change = ending(self._settings, RUN_FAILED, reason, step)
            elif status is RunStatus.FINISHED and self._rank == 0:
                change = ending(self._settings, RUN_FINISHED, reason, step)
            if change is not None:
                return self._report(change, run_json, step)
        return None

    def close(self) -> None:
        """End the alerts of a closed run; deliveries continue. Never blocks."""
        self._notifier.close()

    def _add_values(self, source: str, key: str, values: list[float]) -> None:
        if values:
            self._fresh.setdefault((source, key), []).extend(values)

    def _add_event(self, event: Event) -> None:
        uuid = str(event.data.get("uuid"))
        if event.kind == "gpu_lost":
            self._lost[uuid] = event.text.partition(": ")[2] or event.text
        elif event.kind == "gpu_recovered":
            self._lost.pop(uuid, None)

    def _take_values(self, now: float) -> dict[SeriesKey, list[float]]:
        """Return the values since the last call, or the newest value before it."""
        fresh, self._fresh = self._fresh, {}
        for place, values in fresh.items():
            # A value of a step is valid until the next step; a GPU's value expires.
            self._last[place] = values[-1:], now + STALE_S if place[0] else math.inf
        held = {place: last for place, (last, until) in self._last.items() if now < until}
        return held | fresh

    def _facts(self, run_json: RunJson, step: int, gap: StepGap | None) -> AlertFacts:
        now = self._clock()
        own = training_gpu(run_json)
        values = self._take_values(now)
        # One rank samples the GPUs of all.
        has_peers = (run_json.get("world_size") or 1) > 1
        if has_peers and any(source for source, _ in values) and now >= self._trains_on_until:
            self._trains_on_until = now + RANKS_S
            self._trains_on = _devices_of_ranks(self._folder)
        return AlertFacts(
            now=now,
            step=step,
            gap=gap,
            values=values,
            lost=self._lost,
            labels=_labels(run_json),
            trains_on=self._trains_on | ({own} if own else set()),
            own=own,
        )

    def _report(
        self, change: AlertChange, run_json: RunJson, step: int, device: str | None = None
    ) -> EventParts:
        """Return the event of an alert, and deliver it; delivery errors lose no event."""
        alert = make_alert(change, run_json, self._folder, self._rank, step, device)
        # A job that hangs does so on all ranks: only rank 0 delivers.
        if change.rule.name != NO_STEP or self._rank == 0:
            self._notifier.deliver(alert)
        return KIND, alert.text, event_data(alert)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the alerts after an error, which must not end the recording."""
        try:
            yield
        except Exception as error:
            self._is_off = True
            log.warning("stepscope: alerts ended; recording continues", exc_info=error)


def ending(settings: AlertSettings, name: str, reason: str | None, step: int) -> AlertChange | None:
    """Return the alert of a run's end; None if its rule is disabled. Braces in `reason` stay."""
    for rule in settings.rules:
        if rule.name == name and rule.enabled:
            fields = {"value": reason or "it gives no reason.", "step": f"{step:,}"}
            return AlertChange(rule, AlertState.RAISED, "", fill(rule.text, fields), None)
    return None


def make_alert(
    change: AlertChange,
    run_json: RunJson,
    folder: Path,
    rank: int,
    step: int,
    device: str | None = None,
) -> Alert:
    """Return the alert of a change in the run in `folder`."""
    rule, value = change.rule, change.value
    return Alert(
        rule=rule.name,
        level=rule.level,
        state=change.state,
        text=change.text,
        value=value if value is None or math.isfinite(value) else number_name(value),
        metric=rule.metric or None,
        device=device,
        run=folder.name,
        name=str(run_json.get("name")),
        folder=str(folder),
        host=str(run_json.get("host")),
        rank=rank,
        step=step,
        ts=time.time(),
    )


def event_data(alert: Alert) -> dict[str, Any]:
    """Return the data of an alert's event."""
    data: dict[str, Any] = {"rule": alert.rule, "level": str(alert.level)}
    data |= {"state": str(alert.state), "value": alert.value}
    optional = {"metric": alert.metric, "uuid": alert.device}
    return data | {name: value for name, value in optional.items() if value is not None}


def _devices_of_ranks(folder: Path) -> frozenset[str]:
    devices = set()
    for number in rank_numbers(folder):
        with contextlib.suppress(*UNREADABLE):  # incomplete, or of a host that is gone
            devices.add(training_gpu(read_run_json(folder, number)) or "")
    return frozenset(devices)


def _labels(run_json: RunJson) -> dict[str, str]:
    """Return the names of the sampled GPUs; of several GPUs with the UUID's beginning."""
    names = {str(gpu["uuid"]): str(gpu["name"]) for gpu in run_json.get("devices") or ()}
    if len(names) < 2:
        return names
    return {uuid: f"{name} ({uuid[:12]})" for uuid, name in names.items()}


MARKER = "crash-told"  # file in the run folder after the alert
YOUNG_S = 600.0  # Maximum age of the heartbeat of a reported crash; a server may restart meanwhile.


def report_crash(run: RunInfo, settings: AlertSettings) -> AlertNotifier | None:
    """Write the alert's event and deliver it; return the notifier, which the caller closes.

    Returns None without a new crash to report. Of several servers, and several calls, one reports.
    """
    is_new = run.status is RunStatus.CRASHED and run.heartbeat_age_s < YOUNG_S
    if settings.path is None or not is_new or not is_own(run):
        return None
    step = int(run.run_json.get("step") or 0)
    change = ending(settings, RUN_FAILED, run.reason, step)
    if change is None:
        return None
    alert = make_alert(change, run.run_json, run.folder.absolute(), run.cause_rank, step)
    if not _claim(run):  # the last operation that may fail, as no other call reports it then
        return None
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
