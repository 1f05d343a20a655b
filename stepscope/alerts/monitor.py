"""Evaluate alert rules on the rows that the writer thread stores.

Runs once a second in the writer thread, never blocks, and stops after an internal error. A change
becomes an event of kind `alert`, which `AlertSender` delivers. The crash of a killed run is
reported by the dashboard's server (`report_crash`).
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from stepscope.alerts.rules import AlertInstance, fill, holds, is_loss, with_unit
from stepscope.alerts.sender import Alert, open_sender
from stepscope.alerts.settings import (
    ENDINGS,
    NO_STEP,
    RUN_FAILED,
    RUN_FINISHED,
    AlertRule,
    AlertSettings,
    AlertState,
)
from stepscope.common.formatting import format_duration, number_name
from stepscope.common.stall_detector import StepGap
from stepscope.gpu.device_events import throttle_words
from stepscope.run import RunError, RunInfo, RunStatus, is_own
from stepscope.run.rank_info import now_of, of_a_peer, readable_ranks
from stepscope.run_setup import training_gpu
from stepscope.store import SeriesBlock, StoreError, StoreWriter, store_name
from stepscope.store.blocks import Event, QueueItem, Sample
from stepscope.store.recovery import recover_ended

log = logging.getLogger(__name__)

KIND, PROBLEM_KIND = "alert", "alerts_problem"  # Events: alerts, invalid entries of alerts.toml.
RANKS_S = 10.0  # interval of reading which GPUs the other ranks train on
RETRIED_S = 60.0  # time for which a retried allocation counts
KEYS = frozenset({"gpu/mem_used", "gpu/throttle_reasons", "gpu/util", "memory/alloc_retries"})
"""Metrics of the default rules, besides losses."""

EventParts = tuple[str, str, dict[str, Any]]  # kind, text and data of an event
RunJson = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AlertReading:
    """Values of a rule for one source since the last check, and the value in its text."""

    source: str
    values: Sequence[float]
    shown: str
    value: float | None = None


NO_READING = AlertReading("", (), "")


class AlertMonitor:
    """Evaluates the alert rules of one process's run.

    `add` and `check` run in the writer thread, `ended` in the thread that closes the run.
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
        self._rules = [rule for rule in settings.rules if rule.enabled and rule.name not in ENDINGS]
        self._keys = KEYS | {rule.metric for rule in self._rules}
        self._instances: dict[tuple[str, str], AlertInstance] = {}  # by rule and source
        self._values: dict[tuple[str, str], list[float]] = {}
        """Values since the last check, by source ("", or a GPU's UUID) and metric."""
        self._lost: dict[str, str] = {}  # why GPUs cannot be reached, by UUID
        self._trains_on: frozenset[str | None] = frozenset()
        self._trains_on_until = -math.inf
        self._retries: float | None = None
        self._retried_at = -math.inf
        # The other ranks read the same file.
        self._problem = settings.problem if rank == 0 else None
        if self._problem is not None:
            log.warning("stepscope: alerts: %s", self._problem)
        self._is_off = settings.path is None
        has_channel = settings.command is not None or settings.webhook is not None
        self._sender = open_sender() if has_channel else None

    def add(self, block: SeriesBlock, items: Sequence[QueueItem]) -> None:
        """Add stored rows and events."""
        if self._is_off:
            return
        with self._guarded():
            for row, key in enumerate(block.keys):
                if key in self._keys or is_loss(key):
                    has_value = block.count[row] + block.nonfinite[row] > 0
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
            now = self._clock()
            self._read_training_gpus(run_json, now)
            for rule in self._rules:
                for reading in self._readings(rule, run_json, gap):
                    instance = self._instance(rule, reading.source)
                    state = instance.update(now, holds(rule, reading.values))
                    if state is None:
                        continue
                    if state is AlertState.RAISED:
                        instance.text = _text(rule, reading, run_json, step)
                        if rule.name == NO_STEP and hang:
                            instance.text += f". {hang}"
                        text = instance.text
                    else:
                        lasted = format_duration(now - instance.raised_at)
                        text = f"Cleared after {lasted}: {instance.text}"
                    events.append(self._report(rule, state, text, run_json, step, reading))
            self._values.clear()
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
            name = None
            if status is RunStatus.FAILED and not (has_peers and of_a_peer(reason)):
                name = RUN_FAILED
            elif status is RunStatus.FINISHED and self._rank == 0:
                name = RUN_FINISHED
            for rule in self._settings.rules:
                if rule.name == name and rule.enabled:
                    fields = {"value": reason or "it gives no reason.", "step": f"{step:,}"}
                    text = fill(rule.text, fields)
                    return self._report(rule, AlertState.RAISED, text, run_json, step)
        return None

    def _add_values(self, source: str, key: str, values: list[float]) -> None:
        if values:
            self._values.setdefault((source, key), []).extend(values)

    def _add_event(self, event: Event) -> None:
        uuid = str(event.data.get("uuid"))
        if event.kind == "gpu_lost":
            self._lost[uuid] = event.text.partition(": ")[2] or event.text
        elif event.kind == "gpu_recovered":
            self._lost.pop(uuid, None)

    def _instance(self, rule: AlertRule, source: str) -> AlertInstance:
        key = rule.name, source
        if key not in self._instances:
            # The gap of NO_STEP is that long already.
            for_s = 0.0 if rule.name == NO_STEP else rule.for_s
            self._instances[key] = AlertInstance(for_s, rule.clear_s)
        return self._instances[key]

    def _read_training_gpus(self, run_json: RunJson, now: float) -> None:
        """Find the GPUs that all ranks train on: one rank samples the GPUs of all."""
        if (run_json.get("world_size") or 1) == 1:
            self._trains_on = frozenset({training_gpu(run_json)})
        elif now >= self._trains_on_until and any(source for source, _ in self._values):
            self._trains_on_until = now + RANKS_S
            ranks = readable_ranks(self._folder)
            self._trains_on = frozenset(training_gpu(rank.run_json) for rank in ranks)

    def _readings(
        self, rule: AlertRule, run_json: RunJson, gap: StepGap | None
    ) -> Iterator[AlertReading]:
        """Yield the values of a rule by source; a source without a value is not evaluated."""
        if rule.metric:
            for source, values in self._of_metric(rule.metric):
                yield _metric_reading(rule, source, rule.metric, values)
        elif rule.not_finite:
            for (source, key), values in self._values.items():
                if not source and is_loss(key):
                    yield _metric_reading(rule, key, key, values)
        elif rule.name == "memory_full":
            yield from self._memory(run_json)
        elif rule.name == "throttling":
            # In any sample: the bit may flicker.
            for uuid, masks in self._on_training_gpus("gpu/throttle_reasons"):
                known = reduce(or_, (int(mask) for mask in masks if 0 <= mask < 2**63), 0)
                words = [word for word in throttle_words(known) if "thermal" in word]
                yield AlertReading(uuid, [float(bool(words))], ", ".join(words), masks[-1])
        elif rule.name == "gpu_idle":
            for uuid, values in self._on_training_gpus("gpu/util"):
                shown = with_unit("gpu/util", values[-1])
                yield AlertReading(uuid, values if gap else (), shown, values[-1])
        elif rule.name == "gpu_lost":
            before = {source for name, source in self._instances if name == rule.name}
            for uuid in before | self._lost.keys():
                yield AlertReading(uuid, [float(uuid in self._lost)], self._lost.get(uuid, ""))
        elif gap is None:
            yield NO_READING
        else:
            is_stall = gap.is_stall(rule.for_s)
            yield AlertReading("", [float(is_stall)], format_duration(gap.seconds), gap.seconds)

    def _memory(self, run_json: RunJson) -> Iterator[AlertReading]:
        """Yield the used memory in percent, or 0 if no allocation was retried."""
        own = training_gpu(run_json) or ""
        now = self._clock()
        retries = self._values.get(("", "memory/alloc_retries"))
        if retries:
            if self._retries is not None and retries[-1] > self._retries:
                self._retried_at = now
            self._retries = retries[-1]
        used = self._values.get((own, "gpu/mem_used"))
        totals = {gpu["uuid"]: gpu.get("memory_total") for gpu in run_json.get("devices") or ()}
        if used and totals.get(own) and self._retries is not None:
            percent = [100 * value / totals[own] for value in used]
            values = percent if now - self._retried_at < RETRIED_S else [0.0]
            yield AlertReading(own, values, f"{percent[-1]:.0f}%", percent[-1])

    def _of_metric(self, metric: str) -> Iterator[tuple[str, Sequence[float]]]:
        return ((source, found) for (source, key), found in self._values.items() if key == metric)

    def _on_training_gpus(self, metric: str) -> Iterator[tuple[str, Sequence[float]]]:
        return (found for found in self._of_metric(metric) if found[0] in self._trains_on)

    def _report(
        self,
        rule: AlertRule,
        state: AlertState,
        text: str,
        run_json: RunJson,
        step: int,
        reading: AlertReading = NO_READING,
    ) -> EventParts:
        """Return the event of an alert, and deliver it; delivery errors lose no event."""
        value: float | str | None = reading.value
        if reading.value is not None and not math.isfinite(reading.value):
            value = number_name(reading.value)
        alert = Alert(
            rule=rule.name,
            level=rule.level,
            state=state,
            text=text,
            value=value,
            metric=rule.metric or None,
            device=None if rule.not_finite else reading.source or None,
            run=self._folder.name,
            name=str(run_json.get("name")),
            folder=str(self._folder),
            host=str(run_json.get("host")),
            rank=self._rank,
            step=step,
            ts=time.time(),
        )
        # A job that hangs does so on all ranks: only rank 0 delivers.
        if self._sender is not None and (rule.name != NO_STEP or self._rank == 0):
            self._sender.deliver(alert, self._settings)
        data = {"rule": rule.name, "level": str(rule.level), "state": str(state), "value": value}
        return KIND, text, data | {"metric": alert.metric, "uuid": alert.device}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the alerts after an error, which must not end the recording."""
        try:
            yield
        except Exception as error:
            self._is_off = True
            log.warning("stepscope: alerts ended; recording continues", exc_info=error)


def _metric_reading(
    rule: AlertRule, source: str, metric: str, values: Sequence[float]
) -> AlertReading:
    broken = [value for value in values if rule.not_finite and not math.isfinite(value)]
    value = broken[0] if broken else values[-1]
    return AlertReading(source, values, with_unit(metric, value), value)


def _text(rule: AlertRule, reading: AlertReading, run_json: RunJson, step: int) -> str:
    gpus = {str(gpu["uuid"]): str(gpu["name"]) for gpu in run_json.get("devices") or ()}
    device = gpus.get(reading.source, reading.source) or "The process"
    if len(gpus) > 1 and reading.source in gpus:
        device = f"{device} ({reading.source[:12]})"
    # The default rules with a threshold are in percent.
    threshold = rule.threshold
    limit = "" if threshold is None else with_unit(rule.metric or "gpu/util", threshold)
    fields = {
        "value": reading.shown,
        "threshold": limit,
        "metric": rule.metric or reading.source,
        "device": device,
        "seconds": format_duration(rule.for_s),
        "step": f"{step:,}",
    }
    return fill(rule.text, fields)


MARKER = "crash-told"  # file in the run folder after the alert
YOUNG_S = 600.0  # Maximum age of the heartbeat of a reported crash; a server may restart meanwhile.


def report_crash(run: RunInfo, settings: AlertSettings) -> bool:
    """Write the event of a crash, and deliver it; return False if there is nothing to report.

    Of several servers, and several calls, one reports.
    """
    is_new = run.status is RunStatus.CRASHED and run.heartbeat_age_s < YOUNG_S
    if settings.path is None or not is_new or not is_own(run):
        return False
    if not any(rule.name == RUN_FAILED and rule.enabled for rule in settings.rules):
        return False
    try:
        os.close(os.open(run.folder / MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError as error:  # the caller reports a run once
        log.info("%s: cannot be marked as reported: %s", run.id, error)
    run_json = run.run_json
    step = int(run_json.get("step") or 0)
    monitor = AlertMonitor(settings, run.folder.absolute(), rank=run.cause_rank)
    event = monitor.ended(run_json, step, RunStatus.FAILED, run.reason)
    if event is not None:
        _store_event(run, Event(now_of(run_json), step, int(run_json.get("epoch") or 0), *event))
    return True


def _store_event(run: RunInfo, event: Event) -> None:
    """Store an event after the last rows that the process had recorded."""
    try:
        recover_ended(run)
        if os.path.lexists(run.folder / "rank0.ring"):  # an unreadable ring is kept
            return
        store = run.folder / store_name(0)
        with closing(StoreWriter(store, reopen=True)) as writer, writer.transaction():
            writer.add_event(event)
    except (RunError, StoreError, OSError, sqlite3.Error) as error:
        log.warning("%s: the event of its crash could not be stored: %s", run.id, error)
