"""Evaluate alert rules on the rows that the writer thread stores.

Runs once a second in the writer thread, never blocks, and stops after an internal error. A change
becomes an event of kind `alert`, which `AlertSender` delivers. The crash of a killed run is
reported by the dashboard's server (`report_crash`).
"""

from __future__ import annotations

import logging
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from stepscope.alerts.sender import Alert, open_sender
from stepscope.alerts.settings import (
    ENDINGS,
    NO_STEP,
    RUN_FAILED,
    RUN_FINISHED,
    AlertInstance,
    AlertRule,
    AlertSettings,
    AlertState,
    holds,
)
from stepscope.common.formatting import format_bytes, format_duration, number_name
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.common.stall_detector import StepGap
from stepscope.gpu.health import throttle_words
from stepscope.run import RunError, RunInfo, RunStatus, is_own
from stepscope.run.rank_info import of_a_peer, readable_ranks
from stepscope.run_setup import training_gpu
from stepscope.store import SeriesBlock, StoreError, StoreWriter, store_name
from stepscope.store.blocks import Event
from stepscope.store.writer import recover_ended

log = logging.getLogger(__name__)

KIND, PROBLEM_KIND = "alert", "alerts_problem"  # Events: alerts, invalid entries of alerts.toml.
MEMORY_FULL, THROTTLING, GPU_IDLE, GPU_LOST = "memory_full", "throttling", "gpu_idle", "gpu_lost"
KEYS = frozenset({"gpu/mem_used", "gpu/throttle_reasons", "gpu/util", "memory/alloc_retries"})
"""Metrics of the default rules, besides losses."""

EventParts = tuple[str, str, dict[str, Any]]  # kind, text and data of an event
RunJson = Mapping[str, Any]


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
        enabled = [rule for rule in settings.rules if rule.enabled and rule.name not in ENDINGS]
        self._rules = {rule.name: rule for rule in enabled}
        self._keys = KEYS | {rule.metric for rule in enabled}
        self._instances: dict[tuple[str, str], AlertInstance] = {}  # by rule and source
        self._values: dict[tuple[str, str], list[float]] = {}
        """Values since the last check, by source ("", or a GPU's UUID) and metric or rule."""
        self._lost: dict[str, str] = {}  # by UUID why a GPU was lost, "" once it has recovered
        self._retries = 0.0  # retried allocations at the last check
        # The other ranks read the same file.
        self._problem = settings.problem if rank == 0 else None
        if self._problem is not None:
            log.warning("stepscope: alerts: %s", self._problem)
        self._is_off = settings.path is None
        has_channel = settings.command is not None or settings.webhook is not None
        self._sender = open_sender() if has_channel else None

    def add(self, blocks: Mapping[tuple[str, ...], SeriesBlock], events: Sequence[Event]) -> None:
        """Add stored rows by stream and source, and events."""
        if self._is_off:
            return
        with self._guarded():
            for (_, source), block in blocks.items():
                for row, key in enumerate(block.keys):
                    if key in self._keys or is_loss(key):
                        has_value = block.count[row] + block.nonfinite[row] > 0
                        self._add_values(source, key, block.mean[row][has_value].tolist())
            for event in events:
                self._add_event(event)

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
            self._add_rule_values(run_json, gap)
            for rule in self._rules.values():
                for (source, key), values in self._values.items():
                    is_watched_loss = not rule.metric and not source and is_loss(key)
                    if key == (rule.metric or rule.name) or (rule.not_finite and is_watched_loss):
                        events += self._evaluate(rule, source, key, values, run_json, step, hang)
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
            self._lost[uuid] = ""

    def _add_rule_values(self, run_json: RunJson, gap: StepGap | None) -> None:
        """Add the values of the default rules without a metric, under the names of the rules."""
        own = training_gpu(run_json) or ""
        totals = {gpu["uuid"]: gpu.get("memory_total") for gpu in run_json.get("devices") or ()}
        retries = max(self._values.get(("", "memory/alloc_retries"), [0.0]))
        has_retried = retries > self._retries
        self._retries = max(self._retries, retries)
        for (source, key), values in list(self._values.items()):
            if key == "gpu/throttle_reasons":
                # Any sample counts: the bit may flicker.
                hot = [mask for mask in values if _thermal_words(mask)]
                self._values[source, THROTTLING] = hot[:1] or [0.0]
            elif key == "gpu/util":
                # Without a value the rule's duration begins again.
                self._values[source, GPU_IDLE] = [] if gap is None else values
            elif key == "gpu/mem_used" and source == own and totals.get(own):
                used = [100 * value / totals[own] for value in values]
                self._values[own, MEMORY_FULL] = used if has_retried else [0.0]
        for uuid, reason in self._lost.items():
            self._values[uuid, GPU_LOST] = [float(reason != "")]
        if gap is not None and NO_STEP in self._rules:
            is_stall = gap.is_stall(self._rules[NO_STEP].for_s)
            self._values["", NO_STEP] = [gap.seconds if is_stall else 0.0]

    def _evaluate(
        self,
        rule: AlertRule,
        source: str,
        key: str,
        values: list[float],
        run_json: RunJson,
        step: int,
        hang: str | None,
    ) -> list[EventParts]:
        """Update the alert of a rule for one source; return its event if it changes."""
        name = rule.name, source or key
        if name not in self._instances:
            # The gap of NO_STEP is that long already.
            for_s = 0.0 if rule.name == NO_STEP else rule.for_s
            self._instances[name] = AlertInstance(for_s, rule.clear_s)
        instance = self._instances[name]
        now = self._clock()
        state = instance.update(now, holds(rule, values))
        if state is None:
            return []
        broken = [value for value in values if rule.not_finite and not math.isfinite(value)]
        value = [*values, *broken[:1]][-1]
        if state is AlertState.RAISED:
            instance.text = ""
            if rule.name not in (THROTTLING, GPU_IDLE) or self._trains_on(source, run_json):
                shown = self._value_text(key, source, value)
                instance.text = _text(rule, shown, source, key, run_json, step)
                if rule.name == NO_STEP and hang:
                    instance.text += f". {hang}"
        if not instance.text:  # of a GPU on which the run does not train
            return []
        text = instance.text
        if state is AlertState.CLEARED:
            text = f"Cleared after {format_duration(now - instance.raised_at)}: {text}"
        return [self._report(rule, state, text, run_json, step, source, value)]

    def _trains_on(self, uuid: str, run_json: RunJson) -> bool:
        """Return True if this rank trains on the GPU, or another one: one rank samples for all."""
        is_job = (run_json.get("world_size") or 1) > 1
        ranks = readable_ranks(self._folder) if is_job else ()
        return uuid in {training_gpu(one) for one in (run_json, *(rank.run_json for rank in ranks))}

    def _value_text(self, key: str, source: str, value: float) -> str:
        """Return the value of a metric or rule for the text of an alert."""
        if key == GPU_LOST:
            return self._lost[source]
        if key == THROTTLING:
            return ", ".join(_thermal_words(value))
        if key == NO_STEP:
            return format_duration(value)
        if key == MEMORY_FULL:
            return f"{value:.0f}%"
        return with_unit("gpu/util" if key == GPU_IDLE else key, value)

    def _report(
        self,
        rule: AlertRule,
        state: AlertState,
        text: str,
        run_json: RunJson,
        step: int,
        source: str = "",
        number: float | None = None,
    ) -> EventParts:
        """Return the event of an alert, and deliver it; delivery errors lose no event."""
        value: float | str | None = number
        if number is not None and not math.isfinite(number):
            value = number_name(number)
        alert = Alert(
            rule=rule.name,
            level=rule.level,
            state=state,
            text=text,
            value=value,
            metric=rule.metric or None,
            device=source or None,
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


def _thermal_words(mask: float) -> list[str]:
    return [word for word in throttle_words(int(mask)) if "thermal" in word]


def _text(rule: AlertRule, shown: str, source: str, key: str, run_json: RunJson, step: int) -> str:
    gpus = {str(gpu["uuid"]): str(gpu["name"]) for gpu in run_json.get("devices") or ()}
    device = gpus.get(source, source) or "The process"
    if len(gpus) > 1 and source in gpus:
        device = f"{device} ({source[:12]})"
    # The default rules with a threshold are in percent.
    threshold = rule.threshold
    limit = "" if threshold is None else with_unit(rule.metric or "gpu/util", threshold)
    fields = {
        "value": shown,
        "threshold": limit,
        "metric": key,
        "device": device,
        "seconds": format_duration(rule.for_s),
        "step": f"{step:,}",
    }
    return fill(rule.text, fields)


def is_loss(key: str) -> bool:
    """Return True if the default rules watch this metric of a step."""
    return key in ("train/loss", "val/loss") or key.startswith("train/loss.")


def with_unit(metric: str, value: float) -> str:
    """Return a value with the unit of its metric."""
    unit = BY_KEY[metric].unit if metric in BY_KEY else Unit.NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if unit is Unit.BYTES:
        return format_bytes(value)
    if unit in (Unit.NONE, Unit.COUNT, Unit.MASK):
        return f"{value:.4g}"
    return f"{value:.4g}{unit}" if unit is Unit.PERCENT else f"{value:.4g} {unit}"


def fill(text: str, fields: Mapping[str, str]) -> str:
    """Replace the fields in one pass; unknown braces are kept."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)


MARKER = "crash-alert-sent"  # file in the run folder after the alert
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
        _store_event(run, Event(time.time(), step, int(run_json.get("epoch") or 0), *event))
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
