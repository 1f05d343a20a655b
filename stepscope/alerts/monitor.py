"""Sees what the writer thread stores, and looks at the rules once a second, in that thread.

What changes becomes an event of kind `alert` and goes to the user's command and webhook. Nothing
here waits, and nothing here may harm the recording: after an error of its own it ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.alerts.config import Settings
from stepscope.alerts.evaluator import Change, Facts, Judge, ending
from stepscope.alerts.notifier import Actions, Alert
from stepscope.alerts.rules import ENDINGS, NO_STEP, RUN_FAILED, RUN_FINISHED, Rule, State
from stepscope.alerts.seen import Seen
from stepscope.common.formatting import number_name
from stepscope.run import RunKind, RunStatus
from stepscope.run.first_cause import RankEnd
from stepscope.run.rank_info import UNREADABLE, rank_numbers, read_run_json
from stepscope.store import Block
from stepscope.store.items import Event, Item, Sample

log = logging.getLogger(__name__)

KIND = "alert"
"""Kind of the events."""
PROBLEM_KIND = "alerts_problem"
"""Kind of the event that says what is wrong with alerts.toml."""
RANKS_S = 10.0
"""How often to look which GPUs the other ranks train on."""

Told = tuple[str, str, dict[str, Any]]
"""Kind, text and data of an event."""


class Watch:
    """Watches one process's run.

    `busy` says whether something of ours holds the training up, `stuck` why a job of several ranks
    makes no step, where that is known; `signs` returns a number that rises with work of it that
    need not be a step. `saw` and `look` are called by the writer thread,
    `ended` and `close` by who closes the run.
    """

    def __init__(
        self,
        settings: Settings,
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
        self._judge = Judge(settings.rules)
        self._actions = Actions(settings)
        self._seen = Seen(settings.rules)
        self._others: tuple[frozenset[str], float] = frozenset(), -math.inf
        self._says: list[Told] = []
        if rank == 0:  # the others read the same file
            self._says = [(PROBLEM_KIND, text, {}) for text in settings.problems]
            for text in settings.problems:
                log.warning("stepscope: alerts: %s", text)
        self._broken = not settings.on

    def saw(self, block: Block, items: Sequence[Item]) -> None:
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
                Change(rule, State.RAISED, "", text, None), run_json, Facts(now=0.0, step=step)
            )
        except Exception as error:  # noqa: BLE001 - the run has to be closed all the same
            self._give_up(error)
            return None

    def close(self) -> None:
        """The run is closed: no more alerts come. Deliveries under way go on; waits for nothing."""
        self._actions.close()

    def _ending(
        self, run_json: Mapping[str, Any], status: RunStatus, reason: str | None
    ) -> Rule | None:
        wanted = None
        # A run of one process has no peers: its lost connection is one to somebody else.
        has_peers = self._rank > 0 or _has_peers(run_json)
        of_a_peer = has_peers and RankEnd(self._rank, 0.0, 0.0, reason).of_a_peer
        if status is RunStatus.FAILED and not of_a_peer:
            wanted = RUN_FAILED
        elif status is RunStatus.FINISHED and self._rank == 0:
            wanted = RUN_FINISHED
        found = (rule for rule in self._settings.rules if rule.name in ENDINGS and rule.enabled)
        return next((rule for rule in found if rule.name == wanted), None)

    def _facts(self, run_json: Mapping[str, Any], step: int) -> Facts:
        now = self._clock()
        spans = self._seen.since_last(now)
        total = run_json.get("total_steps")
        has_ended = type(total) is int and 0 < total <= step
        due = run_json.get("status") == RunStatus.RUNNING and not has_ended and not self.busy()
        own, memory = _device(run_json), run_json.get("device_memory")
        return Facts(
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

    def _tell(self, change: Change, run_json: Mapping[str, Any], facts: Facts) -> Told:
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

    def _with_cause(self, change: Change) -> Change:
        """Add the rank and the collective to the words of a hang: one alert tells of it."""
        cause = self.stuck() if change.rule.name == NO_STEP else None
        if cause is None or change.state is not State.RAISED:
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
