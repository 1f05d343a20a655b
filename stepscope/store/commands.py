"""Commands from the page, and their queue to the training thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any

import msgspec

log = logging.getLogger(__name__)


class CommandName(StrEnum):
    """A command that a page may send to a run."""

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


class Command(msgspec.Struct, frozen=True):
    """One command for this run; `args` is untrusted input of the page: validate before use."""

    id: int
    name: CommandName
    args: dict[str, Any]

    @property
    def label(self) -> str:
        """The name that the page shows."""
        return self.name.replace("_", " ").capitalize()


class CommandQueue:
    """Commands of a run, from the writer thread to the training thread.

    Those of a single process, executed at its next step boundary; see `JobCommands` for a job.
    `request_boundary` is called after a command is queued, `on_command` before that.
    """

    def __init__(
        self, request_boundary: Callable[[], None], on_command: Callable[[Command], None]
    ) -> None:
        self._queue: deque[Command] = deque()
        self.waiting: Collection[object] = self._queue
        """Not empty when a boundary has to take commands."""
        self._came = threading.Event()
        self._request_boundary = request_boundary
        self._on_command = on_command

    def offer(self, command: Command) -> None:
        """Queue a command. Thread-safe."""
        try:
            self._on_command(command)
        except Exception:
            log.exception("stepscope: a command could not be announced")
        self._queue.append(command)
        self._came.set()
        self._request_boundary()

    def take(self, *, paused: bool = False) -> Command | None:
        """Return the next command that is due at this boundary, or in this pause."""
        return self._queue.popleft() if self._queue else None

    def wait(self, timeout_s: float) -> None:
        """Wait until a command may be due, at most `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()

    def may_leave(self) -> bool:
        """Return True if the training may leave its boundary."""
        return True

    def close(self) -> None:
        """End the agreement of the ranks; before the recorder closes."""

    def abandon(self) -> None:
        """Detach after fork, in the child."""
