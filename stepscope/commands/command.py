"""What a page asks of a run, and the queue that brings it to the training thread."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class CommandName(StrEnum):
    """What a page may ask of a run."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    EMPTY_CACHE = "empty_cache"
    RESET_PEAKS = "reset_peaks"
    COLLECT_GARBAGE = "collect_garbage"
    SAVE_CHECKPOINT = "save_checkpoint"
    MARK = "mark"
    MEMORY_SNAPSHOT = "memory_snapshot"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Command:
    """One command asked of this run; `args` is as the page gave it: check before use."""

    id: int
    name: CommandName
    args: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name as the page writes it."""
        return self.name.replace("_", " ").capitalize()


def parse_args(args: str) -> dict[str, Any]:
    """Return a command's arguments. Raises ValueError or TypeError for what is no JSON object."""
    try:
        return dict(json.loads(args))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class Commands(Protocol):
    """The commands on their way to the training thread: of one process, or of a job's rank."""

    waiting: Collection[object]
    """Looked at in every step: not empty when a boundary has to take the long way."""

    def offer(self, command: Command) -> None:
        """Take a command that came; called by the writer's thread."""

    def take(self) -> list[Command]:
        """Return what this boundary has to serve; called by the training thread."""

    def put_back(self, commands: Sequence[Command]) -> None:
        """Keep commands for the next boundary: they need a whole step, or stand behind a stop."""

    def wait(self, timeout_s: float) -> list[Command]:
        """Wait for a command, at most `timeout_s`; for a training that stands at a boundary."""

    def may_leave(self) -> bool:
        """Say whether the training may leave its boundary: asked until it may."""

    def leave(self) -> None:
        """The training has left its boundary by an exception."""


class OwnCommands:
    """The commands of a process that is alone in its run: the next boundary serves them.

    `closed_gate` is called after a command came, `opened` after the last was taken.
    """

    def __init__(self, closed_gate: Callable[[], None], opened: Callable[[], None]) -> None:
        self._queue: deque[Command] = deque()
        self.waiting: Collection[object] = self._queue
        self._came = threading.Event()
        self._close_gate = closed_gate
        self._open_gate = opened

    def offer(self, command: Command) -> None:
        """Have the next boundary serve it."""
        self._queue.append(command)
        self._came.set()
        self._close_gate()

    def take(self) -> list[Command]:
        """Return the commands that came since the last call; costs about 50 ns when none did."""
        if not self._queue:
            return []
        # Cleared before emptying: a command that comes in between sets it again.
        self._came.clear()
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        self._open_gate()
        return taken

    def put_back(self, commands: Sequence[Command]) -> None:
        """Keep commands for the next boundary."""
        if commands:
            self._queue.extendleft(reversed(commands))
            self._close_gate()

    def wait(self, timeout_s: float) -> list[Command]:
        """Wait for a command, at most `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()
        return self.take()

    def may_leave(self) -> bool:
        """Return True: nobody else has to serve the same."""
        return True

    def leave(self) -> None:
        """Do nothing: nobody waits for this training."""
