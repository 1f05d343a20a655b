"""What a rank of a job records of the commands that all ranks serve together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from stepscope.commands.command import Command, CommandName
from stepscope.commands.consensus import KEPT
from stepscope.commands.job_queue import JobCommandQueue, RankResults
from stepscope.common.clock import clock
from stepscope.store import StoreError
from stepscope.store.blocks import CommandResult, Event
from stepscope.store.reader import send_command

log = logging.getLogger(__name__)

CombineResults = Callable[[Command, RankResults], str | None]
"""Makes the text of number 0's event from what came of a command on all ranks; None: its own."""


class EventRecorder(Protocol):
    """What a job needs of the recorder."""

    step: int

    def finish(self, command: Command, text: str, *, ok: bool = True, **data: Any) -> None:
        """Acknowledge a command."""

    def event(self, kind: str, text: str, /, **data: Any) -> None:
        """Mark an event."""

    def describe(self, **run_json: Any) -> None:
        """Add entries to run.json."""

    def want_boundary(self) -> None:
        """Have the next step take the long way."""

    def put_ended(self, ended: CommandResult, event: Event) -> None:
        """Store how a command ended."""


class JobCommandRecorder:
    """One rank's part in the commands of a job; `commands` brings them to the training thread.

    `on_command` hears of a command as it is proposed. `on_withdrawn` returns whether it deals by
    itself with one on which the ranks did not agree. Raises OSError.
    """

    def __init__(
        self,
        recorder: EventRecorder,
        folder: Path,
        number: int,
        ranks: int,
        *,
        lead: int,
        on_command: Callable[[Command], None],
    ) -> None:
        self._recorder = recorder
        self._folder = folder
        self._number = number
        self._on_command = on_command
        self.on_withdrawn: Callable[[Command], bool] = lambda _command: False
        self.combined: CombineResults = lambda _command, _results: None
        self._stop_asked = False
        self._lock = threading.RLock()  # a signal handler may come in the middle
        self._kept: dict[int, tuple[CommandResult, Event]] = {}
        self._answered: deque[int] = deque(maxlen=KEPT)
        self.commands = JobCommandQueue(
            folder,
            number,
            ranks,
            self,
            step=lambda: recorder.step,
            lead=lead,
            flag=recorder.want_boundary,
        )

    def ended(self, command: Command, ok: bool, ended: CommandResult, event: Event) -> None:
        """Record what came of a command on this rank.

        Number 0's event waits a moment for what came of it on the others, to tell of all ranks.
        """
        self._answered.append(command.id)
        figures: dict[str, Any] = {
            key: event.data[key] for key in ("before", "after") if key in event.data
        }
        keep = self._number == 0 and ok and bool(figures)
        if keep:
            with self._lock:
                self._kept[command.id] = (ended, event)
        else:
            self._recorder.put_ended(ended, event)
        self.commands.ended(command, ok, figures)

    def close(self) -> None:
        """End the agreement, and record what is still to be recorded."""
        unserved = self.commands.close()
        for id_ in list(self._kept):
            self._release(id_, None)
        if self._number == 0:
            self._recorder.describe(command_waits=None)
            for step, command in unserved:
                if command.id in self._answered:  # a Stop that has acted without a boundary
                    continue
                before = "the ranks agreed" if step is None else f"step {step}"
                text = f"{command.label}: the run ended before {before}"
                self._recorder.finish(command, text, ok=False)

    def heard(self, command: Command) -> None:
        """Announce a command; of a Stop run.json has the time, as it may never be served."""
        if command.name is CommandName.STOP and self._number == 0 and not self._stop_asked:
            self._stop_asked = True
            self._recorder.describe(stop_asked=clock.now())
        try:
            self._on_command(command)
        except Exception:
            log.exception("stepscope: a command could not be announced")

    def withdrawn(self, command: Command, why: str) -> None:
        """Record that no rank serves it."""
        dealt_with = self.on_withdrawn(command)
        if self._number:
            return
        if dealt_with:
            text = f"{command.label} cannot run at the same step on all ranks: {why}"
            self._recorder.event(command.name, text, ok=False)
        else:
            text = f"{command.label}: withdrawn on all ranks: {why}"
            self._recorder.finish(command, text, ok=False)

    def refused(self, command: Command, why: str) -> None:
        """Record that this rank does not serve what the others do."""
        self._recorder.finish(command, f"{command.label}: not on this rank: {why}", ok=False)

    def waits(self, waiting: Mapping[str, Any] | None) -> None:
        """Say in run.json which ranks a command waits for."""
        self._recorder.describe(command_waits=waiting)

    def stop_wanted(self, reason: str) -> None:
        """Ask for Stop as the page does, unless somebody has."""
        if self._stop_asked:
            return
        try:
            send_command(self._folder, CommandName.STOP, {"reason": reason})
        except StoreError as error:
            log.warning("stepscope: the ranks could not be asked to stop: %s", error)

    def results(self, command: Command, results: RankResults) -> None:
        """Record number 0's event, with what came of it on the other ranks."""
        self._release(command.id, self.combined(command, results))

    def _release(self, id_: int, text: str | None) -> None:
        with self._lock:
            kept = self._kept.pop(id_, None)
        if kept is None:
            return
        ended, event = kept
        if text is not None:
            ended = replace(ended, ts=clock.now(), result=text)
            event = replace(event, text=text, data={**event.data, "rank0": event.text})
        self._recorder.put_ended(ended, event)
