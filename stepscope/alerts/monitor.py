"""Feed alert rules with the rows that the writer thread stores.

It runs once a second in the writer thread. A change becomes an event of kind `alert` and goes to
the user's command and webhook. It never blocks, and ends after an error of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.alerts.config import AlertSettings
from stepscope.alerts.evaluator import (
    LOSSES,
    AlertInputs,
    AlertTransition,
    RuleEvaluator,
    ending,
    is_of_devices,
)
from stepscope.alerts.notifier import Alert, AlertNotifier
from stepscope.alerts.rules import (
    ENDINGS,
    NO_STEP,
    RUN_FAILED,
    RUN_FINISHED,
    AlertRule,
    AlertState,
    WindowStats,
)
from stepscope.common.formatting import number_name
from stepscope.run import RunKind, RunStatus
from stepscope.run.rank_info import UNREADABLE, RankExit, rank_numbers, read_run_json
from stepscope.store import SeriesBlock
from stepscope.store.blocks import Event, QueueItem, Sample

STALE_S = 30.0
"""Age from which a sampled value no longer says anything; the slowest tier is read every 10 s."""
OF_DEVICES = frozenset({"gpu/mem_used", "gpu/mem_total", "gpu/throttle_reasons", "gpu/util"})
OF_PROCESS = frozenset({"memory/alloc_retries", "memory/reserved"})

SeriesKey = tuple[str, str]
"""Source ("" for the process, a UUID for a GPU) and metric."""


class WindowAggregator:
    """Keeps what the rules ask for, and no other metric; used by one thread."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        metrics = {rule.metric for rule in rules if rule.enabled and rule.metric}
        of_devices = frozenset(filter(is_of_devices, metrics))
        self._device_keys = OF_DEVICES | of_devices
        self._other_keys = OF_PROCESS | frozenset(LOSSES) | (metrics - of_devices)
        self._fresh: dict[SeriesKey, WindowStats] = {}
        self._sampled: dict[SeriesKey, list[float]] = {}
        self._held: dict[SeriesKey, tuple[WindowStats, float]] = {}
        self._of_steps: set[SeriesKey] = set()
        self.samples_gpus = False
        """Says whether this process samples any GPU."""
        self.lost: dict[str, str] = {}
        """Why GPUs cannot be reached, by UUID."""

    def take_steps(self, block: SeriesBlock) -> None:
        """Take in rows of steps."""
        for row, key in enumerate(block.keys):
            if key not in self._other_keys and not key.startswith("train/loss."):
                continue
            values = block.mean[row]
            have = np.flatnonzero(block.count[row] + block.odd[row])
            if not len(have):
                continue
            given, odd = values[have], have[block.odd[row][have] > 0]
            known = given[~np.isnan(given)]
            span = WindowStats(
                float(known.min()) if len(known) else None,
                float(known.max()) if len(known) else None,
                float(given[-1]),
                float(values[odd[0]]) if len(odd) else None,
                int(block.step[odd[0]]) if len(odd) else None,
            )
            former = self._fresh.get(("", key))
            self._fresh["", key] = span if former is None else former.then(span)
            self._of_steps.add(("", key))

    def take_sample(self, sample: Sample) -> None:
        """Take in one tick of the sampler."""
        keys = self._device_keys if sample.source else self._other_keys
        self.samples_gpus = self.samples_gpus or bool(sample.source)
        for key in keys & sample.values.keys():
            value = sample.values[key]
            if value is not None:
                self._sampled.setdefault((sample.source, key), []).append(value)

    def take_event(self, event: Event) -> None:
        """Take in what the sampler says of GPUs that are lost or back."""
        uuid = str(event.data.get("uuid"))
        if event.kind == "gpu_lost":
            self.lost[uuid] = event.text.partition(": ")[2] or event.text
        elif event.kind == "gpu_recovered":
            self.lost.pop(uuid, None)

    def since_last(self, now: float) -> dict[SeriesKey, WindowStats]:
        """Return what came since the last call; where nothing came, the newest value before."""
        fresh, self._fresh = self._fresh, {}
        sampled, self._sampled = self._sampled, {}
        for place, values in sampled.items():
            span = WindowStats.of_all(values)
            fresh[place] = fresh[place].then(span) if place in fresh else span
        for place, span in fresh.items():
            # A value of a step stays true until the next step; a sampled one grows old.
            until = math.inf if place in self._of_steps else now + STALE_S
            self._held[place] = span.held(), until
        held = {place: span for place, (span, until) in self._held.items() if now < until}
        return held | fresh


log = logging.getLogger(__name__)

KIND = "alert"
"""Kind of the events."""
PROBLEM_KIND = "alerts_problem"
"""Kind of the event that says what is wrong with alerts.toml."""
RANKS_S = 10.0
"""How often to look which GPUs the other ranks train on."""

Told = tuple[str, str, dict[str, Any]]
"""Kind, text and data of an event."""


class AlertMonitor:
    """Watches one process's run.

    `busy` says whether something of ours holds the training up, `stuck` why a job of several ranks
    makes no step, where that is known; `signs` returns a number that rises with work of it that
    need not be a step. `saw` and `look` are called by the writer thread,
    `ended` and `close` by who closes the run.
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
        self._judge = RuleEvaluator(settings.rules)
        self._actions = AlertNotifier(settings)
        self._seen = WindowAggregator(settings.rules)
        self._others: tuple[frozenset[str], float] = frozenset(), -math.inf
        self._says: list[Told] = []
        if rank == 0:  # the others read the same file
            self._says = [(PROBLEM_KIND, text, {}) for text in settings.problems]
            for text in settings.problems:
                log.warning("stepscope: alerts: %s", text)
        self._broken = not settings.on

    def saw(self, block: SeriesBlock, items: Sequence[QueueItem]) -> None:
        """Take in rows and events that are in the store now."""
        if self._broken:
            return
        try:
            self._seen.take_steps(block)
            for item in items:
                if isinstance(item, Sample):
                    self._seen.take_sample(item)
                elif isinstance(item, Event):
                    self._seen.take_event(item)
        except Exception as error:  # noqa: BLE001 - it must not end the writer thread
            self._give_up(error)

    def look(self, run_json: Mapping[str, Any], step: int) -> list[Told]:
        """Judge all rules; return the events to write."""
        says, self._says = self._says, []
        if self._broken:
            return says
        try:
            facts = self._facts(run_json, step)
            for change in self._judge.look(facts):
                says.append(self._tell(self._with_cause(change), run_json, facts))
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
        return says

    def ended(
        self, run_json: Mapping[str, Any], step: int, status: RunStatus, reason: str | None
    ) -> Told | None:
        """Return the event of a run that ends so, if it alerts.

        Of several ranks only those speak that did not fail because another one had.
        """
        try:
            rule = self._ending(run_json, status, reason)
            if rule is None or self._broken:
                return None
            text = ending(rule, reason, step)
            return self._tell(
                AlertTransition(rule, AlertState.RAISED, "", text, None),
                run_json,
                AlertInputs(now=0.0, step=step),
            )
        except Exception as error:  # noqa: BLE001 - the run has to be closed all the same
            self._give_up(error)
            return None

    def close(self) -> None:
        """The run is closed: no more alerts come. Deliveries under way go on; waits for nothing."""
        self._actions.close()

    def _ending(
        self, run_json: Mapping[str, Any], status: RunStatus, reason: str | None
    ) -> AlertRule | None:
        wanted = None
        # A run of one process has no peers: its lost connection is one to somebody else.
        has_peers = self._rank > 0 or _has_peers(run_json)
        of_a_peer = has_peers and RankExit(self._rank, 0.0, 0.0, reason).of_a_peer
        if status is RunStatus.FAILED and not of_a_peer:
            wanted = RUN_FAILED
        elif status is RunStatus.FINISHED and self._rank == 0:
            wanted = RUN_FINISHED
        found = (rule for rule in self._settings.rules if rule.name in ENDINGS and rule.enabled)
        return next((rule for rule in found if rule.name == wanted), None)

    def _facts(self, run_json: Mapping[str, Any], step: int) -> AlertInputs:
        now = self._clock()
        spans = self._seen.since_last(now)
        total = run_json.get("total_steps")
        has_ended = type(total) is int and 0 < total <= step
        due = run_json.get("status") == RunStatus.RUNNING and not has_ended and not self.busy()
        own, memory = _device(run_json), run_json.get("device_memory")
        return AlertInputs(
            now=now,
            step=step,
            step_due=due,
            sign=self._signs(),
            spans=spans,
            lost=self._seen.lost,
            labels=_labels(run_json),
            trains_on=self._trains_on(run_json, own, now),
            own=own,
            own_total=float(memory) if isinstance(memory, int) else None,
        )

    def _trains_on(
        self, run_json: Mapping[str, Any], own: str | None, now: float
    ) -> frozenset[str]:
        """Return the GPUs of this run; one rank of a machine samples those of all its ranks."""
        mine = frozenset() if own is None else frozenset({own})
        if not _has_peers(run_json) or not self._seen.samples_gpus:
            return mine
        others, read_at = self._others
        if now - read_at >= RANKS_S:
            others = frozenset(_devices_of_ranks(self._folder))
            self._others = others, now
        return mine | others

    def _tell(
        self, change: AlertTransition, run_json: Mapping[str, Any], facts: AlertInputs
    ) -> Told:
        """Return the event of an alert; the actions get it, whose errors cost no event."""
        rule, value = change.rule, change.value
        data: dict[str, Any] = {
            "rule": rule.name,
            "level": str(rule.level),
            "state": str(change.state),
            "value": value if value is None or math.isfinite(value) else number_name(value),
        }
        if rule.metric:
            data["metric"] = rule.metric
        if change.source in facts.labels or change.source in facts.lost:
            data["uuid"] = change.source
        self._deliver(
            Alert(
                rule=rule.name,
                level=rule.level,
                state=change.state,
                text=change.text,
                value=data["value"],
                metric=rule.metric or None,
                device=data.get("uuid"),
                run=self._folder.name,
                name=str(run_json.get("name")),
                folder=str(self._folder),
                host=str(run_json.get("host")),
                rank=self._rank,
                step=facts.step,
                ts=time.time(),
            )
        )
        return KIND, change.text, data

    def _with_cause(self, change: AlertTransition) -> AlertTransition:
        """Add the rank and the collective to the words of a hang: one alert tells of it."""
        cause = self.stuck() if change.rule.name == NO_STEP else None
        if cause is None or change.state is not AlertState.RAISED:
            return change
        return replace(change, text=f"{change.text}. {cause}")

    def _deliver(self, alert: Alert) -> None:
        if alert.rule == NO_STEP and self._rank > 0:
            return  # a job that hangs does so on all ranks: the first one tells
        try:
            self._actions.deliver(alert)
        except Exception:
            log.warning("stepscope: alerts: one could not be told", exc_info=True)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        log.warning("stepscope: alerts ended; recording goes on", exc_info=error)


def _has_peers(run_json: Mapping[str, Any]) -> bool:
    """Say whether the run has other ranks."""
    world_size = run_json.get("world_size", 1)
    return isinstance(world_size, int) and world_size > 1


def _device(run_json: Mapping[str, Any]) -> str | None:
    """Return the UUID of the GPU that this process trains on; None for a CPU, or not known yet."""
    device = run_json.get("device")
    if device is None and run_json.get("kind") == RunKind.TRAINER:
        config = run_json.get("config")
        device = config.get("device") if isinstance(config, dict) else None
    return device if isinstance(device, str) and device != "cpu" else None


def _devices_of_ranks(folder: Path) -> list[str]:
    found = []
    for number in rank_numbers(folder):
        try:
            device = _device(read_run_json(folder, number))
        except UNREADABLE:
            continue  # being made, or of another machine that is gone
        if device is not None:
            found.append(device)
    return found


def _labels(run_json: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the sampled GPUs, with the beginning of the UUID where they are many."""
    listed = run_json.get("devices") or ()
    names = {str(gpu["uuid"]): str(gpu["name"]) for gpu in listed}
    if len(names) < 2:
        return names
    return {uuid: f"{name} ({uuid[:12]})" for uuid, name in names.items()}
