"""Evaluate alert rules on the rows that the writer thread stores.

It runs once a second in the writer thread. A change becomes an event of kind `alert` and is
delivered by `AlertNotifier`. It never blocks, and stops after an error of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.alerts.evaluator import (
    LOSSES,
    AlarmChange,
    AlertEvaluator,
    AlertFacts,
    ending,
    is_device_metric,
)
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.rules import NO_STEP, RUN_FAILED, RUN_FINISHED, AlertRule, AlertState
from stepscope.alerts.settings import AlertSettings
from stepscope.bottleneck.step_window import training_gpu
from stepscope.common.formatting import number_name
from stepscope.run import RunStatus
from stepscope.run.rank_info import UNREADABLE, RankExit, rank_numbers, read_run_json
from stepscope.store import SeriesBlock
from stepscope.store.blocks import Event, QueueItem, Sample

log = logging.getLogger(__name__)

KIND, PROBLEM_KIND = "alert", "alerts_problem"
"""Kinds of the events of alerts, and of invalid entries of alerts.toml."""
RANKS_S = 10.0  # Interval of reading which GPUs the other ranks train on.
STALE_S = 30.0  # Age at which a sampled value expires; the slowest tier is read every 10 s.
_DEVICE_KEYS = frozenset({"gpu/mem_used", "gpu/mem_total", "gpu/throttle_reasons", "gpu/util"})
_PROCESS_KEYS = frozenset({"memory/alloc_retries", "memory/reserved", *LOSSES})

EventParts = tuple[str, str, dict[str, Any]]  # Kind, text and data of an event.
RunJson = Mapping[str, Any]
SeriesKey = tuple[str, str]  # Source ("" for the process, a UUID for a GPU) and metric.


class RecentValues:
    """The values that rules need since the last evaluation; used by one thread."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        metrics = {rule.metric for rule in rules if rule.enabled and rule.metric}
        of_devices = set(filter(is_device_metric, metrics))
        self._device_keys = _DEVICE_KEYS | of_devices
        self._other_keys = _PROCESS_KEYS | (metrics - of_devices)
        self._fresh: dict[SeriesKey, list[float]] = {}
        self._odd_steps: dict[SeriesKey, int] = {}
        self._last: dict[SeriesKey, tuple[list[float], float]] = {}
        self._of_steps: set[SeriesKey] = set()
        self.has_gpus = False
        """Whether this process samples any GPU."""
        self.lost: dict[str, str] = {}
        """Why GPUs cannot be reached, by UUID."""

    def add_steps(self, block: SeriesBlock) -> None:
        """Add rows of steps: of each metric what `condition_of` can distinguish."""
        for row, key in enumerate(block.keys):
            if key not in self._other_keys and not key.startswith("train/loss."):
                continue
            (have,) = np.nonzero(block.count[row] + block.odd[row])
            if not len(have):
                continue
            place, values = ("", key), block.mean[row][have]
            odd = have[block.odd[row][have] > 0]
            known = values[~np.isnan(values)]
            fresh = self._fresh.setdefault(place, [])
            if len(odd):
                fresh.append(float(block.mean[row][odd[0]]))
                self._odd_steps.setdefault(place, int(block.step[odd[0]]))
            if len(known):
                fresh += [float(known.min()), float(known.max())]
            fresh.append(float(values[-1]))
            self._of_steps.add(place)

    def add_sample(self, sample: Sample) -> None:
        """Add one tick of the sampler."""
        keys = self._device_keys if sample.source else self._other_keys
        self.has_gpus = self.has_gpus or bool(sample.source)
        for key in keys & sample.values.keys():
            value = sample.values[key]
            if value is not None:
                self._fresh.setdefault((sample.source, key), []).append(value)

    def add_event(self, event: Event) -> None:
        """Add an event about a GPU that is lost or back."""
        uuid = str(event.data.get("uuid"))
        if event.kind == "gpu_lost":
            self.lost[uuid] = event.text.partition(": ")[2] or event.text
        elif event.kind == "gpu_recovered":
            self.lost.pop(uuid, None)

    def take(self, now: float) -> tuple[dict[SeriesKey, list[float]], dict[SeriesKey, int]]:
        """Return the values since the last call, or the newest before it, and the odd steps."""
        fresh, self._fresh = self._fresh, {}
        odd_steps, self._odd_steps = self._odd_steps, {}
        for place, values in fresh.items():
            # A value of a step is valid until the next step; a sampled one expires.
            until = math.inf if place in self._of_steps else now + STALE_S
            self._last[place] = values[-1:], until
        held = {place: last for place, (last, until) in self._last.items() if now < until}
        return held | fresh, odd_steps


class AlertMonitor:
    """Evaluates the alert rules of one process's run.

    `busy` returns whether Stepscope holds the training up, `stuck` why a job of several ranks makes
    no step, if that is known. `signs` returns a number that rises with work other than steps.
    `saw` and `look` are called by the writer thread, `ended` and `close` by who closes the run.
    """

    def __init__(
        self,
        settings: AlertSettings,
        folder: Path,
        *,
        rank: int = 0,
        signs: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.busy: Callable[[], bool] = lambda: False
        self.stuck: Callable[[], str | None] = lambda: None
        self._signs = signs
        self._settings = settings
        self._folder = folder
        self._rank = rank
        self._clock = clock
        self._evaluator = AlertEvaluator(settings.rules)
        self._notifier = AlertNotifier(settings)
        self._recent = RecentValues(settings.rules)
        self._others: tuple[frozenset[str], float] = frozenset(), -math.inf
        # The other ranks read the same file.
        self._problems = settings.problems if rank == 0 else ()
        for text in self._problems:
            log.warning("stepscope: alerts: %s", text)
        self._broken = settings.path is None

    def saw(self, block: SeriesBlock, items: Sequence[QueueItem]) -> None:
        """Add rows and events that are in the store now."""
        if self._broken:
            return
        try:
            self._recent.add_steps(block)
            for item in items:
                if isinstance(item, Sample):
                    self._recent.add_sample(item)
                elif isinstance(item, Event):
                    self._recent.add_event(item)
        except Exception as error:  # noqa: BLE001 - it must not end the writer thread
            self._give_up(error)

    def look(self, run_json: RunJson, step: int) -> list[EventParts]:
        """Evaluate all rules; return the events to write."""
        events: list[EventParts] = [(PROBLEM_KIND, text, {}) for text in self._problems]
        self._problems = ()
        if self._broken:
            return events
        try:
            facts = self._facts(run_json, step)
            for change in self._evaluator.evaluate(facts):
                events.append(self._report(change, run_json, facts))
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
        return events

    def ended(
        self, run_json: RunJson, step: int, status: RunStatus, reason: str | None
    ) -> EventParts | None:
        """Return the alert's event of a run that ends, if there is one.

        A rank that failed because another one had failed has none.
        """
        try:
            rule = self._ending(run_json, status, reason)
            if rule is None or self._broken:
                return None
            change = AlarmChange(rule, AlertState.RAISED, "", ending(rule, reason, step), None)
            return self._report(change, run_json, AlertFacts(now=0.0, step=step))
        except Exception as error:  # noqa: BLE001 - the run has to be closed all the same
            self._give_up(error)
            return None

    def close(self) -> None:
        """End the alerts of a closed run. Deliveries under way go on; does not wait."""
        self._notifier.close()

    def _ending(self, run_json: RunJson, status: RunStatus, reason: str | None) -> AlertRule | None:
        # A run of one process has no peers: its lost connection is one to somebody else.
        has_peers = self._rank > 0 or _has_peers(run_json)
        of_a_peer = has_peers and RankExit(self._rank, 0.0, 0.0, reason).of_a_peer
        wanted = None
        if status is RunStatus.FAILED and not of_a_peer:
            wanted = RUN_FAILED
        elif status is RunStatus.FINISHED and self._rank == 0:
            wanted = RUN_FINISHED
        return next((r for r in self._settings.rules if r.name == wanted and r.enabled), None)

    def _facts(self, run_json: RunJson, step: int) -> AlertFacts:
        now = self._clock()
        values, odd_steps = self._recent.take(now)
        total = run_json.get("total_steps")
        has_ended = type(total) is int and 0 < total <= step
        due = run_json.get("status") == RunStatus.RUNNING and not has_ended and not self.busy()
        own, memory = training_gpu(run_json), run_json.get("device_memory")
        return AlertFacts(
            now=now,
            step=step,
            step_due=due,
            sign=self._signs(),
            values=values,
            odd_steps=odd_steps,
            lost=self._recent.lost,
            labels=_labels(run_json),
            trains_on=self._trains_on(run_json, own, now),
            own=own,
            own_total=float(memory) if isinstance(memory, int) else None,
        )

    def _trains_on(self, run_json: RunJson, own: str | None, now: float) -> frozenset[str]:
        """Return the GPUs of this run; one rank of a machine samples those of all its ranks."""
        mine = frozenset() if own is None else frozenset({own})
        if not _has_peers(run_json) or not self._recent.has_gpus:
            return mine
        if now - self._others[1] >= RANKS_S:
            self._others = _devices_of_ranks(self._folder), now
        return mine | self._others[0]

    def _report(self, change: AlarmChange, run_json: RunJson, facts: AlertFacts) -> EventParts:
        """Return the event of an alert, and deliver it; delivery errors lose no event."""
        is_hang = change.rule.name == NO_STEP
        cause = self.stuck() if is_hang and change.state is AlertState.RAISED else None
        if cause is not None:  # the rank and the collective
            change = replace(change, text=f"{change.text}. {cause}")
        is_gpu = change.source in facts.labels or change.source in facts.lost
        device = change.source if is_gpu else None
        alert = make_alert(change, run_json, self._folder, self._rank, facts.step, device)
        # A job that hangs does so on all ranks: only the first one delivers.
        if not is_hang or self._rank == 0:
            try:
                self._notifier.deliver(alert)
            except Exception:
                log.warning("stepscope: alerts: one could not be delivered", exc_info=True)
        return KIND, alert.text, event_data(alert)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        log.warning("stepscope: alerts ended; recording goes on", exc_info=error)


def make_alert(
    change: AlarmChange,
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
    data = {"rule": alert.rule, "level": str(alert.level), "state": str(alert.state)}
    also = {"metric": alert.metric, "uuid": alert.device}
    known = {name: found for name, found in also.items() if found is not None}
    return {**data, "value": alert.value, **known}


def _has_peers(run_json: RunJson) -> bool:
    """Return whether the run has other ranks."""
    world_size = run_json.get("world_size", 1)
    return isinstance(world_size, int) and world_size > 1


def _devices_of_ranks(folder: Path) -> frozenset[str]:
    found = set()
    for number in rank_numbers(folder):
        with contextlib.suppress(*UNREADABLE):  # being made, or of another machine that is gone
            found.add(training_gpu(read_run_json(folder, number)) or "")
    return frozenset(found)


def _labels(run_json: RunJson) -> dict[str, str]:
    """Return the names of the sampled GPUs, with the beginning of the UUID where they are many."""
    listed = run_json.get("devices") or ()
    names = {str(gpu["uuid"]): str(gpu["name"]) for gpu in listed}
    if len(names) < 2:
        return names
    return {uuid: f"{name} ({uuid[:12]})" for uuid, name in names.items()}
