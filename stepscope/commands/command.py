"""Commands from the page, their queue to the training thread, and result messages."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from stepscope.common.formatting import format_bytes


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


def parse_args(args: str) -> dict[str, Any]:
    """Return a command's arguments. Raises ValueError or TypeError unless a JSON object."""
    try:
        value = json.loads(args)
        # msgspec cannot encode one half of a surrogate pair.
        return dict(json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class LocalCommandQueue:
    """Commands of a single-process run, executed at the next step boundary.

    `close_gate` is called after a command is queued, `open_gate` after the last one is taken.
    """

    def __init__(self, close_gate: Callable[[], None], open_gate: Callable[[], None]) -> None:
        self._queue: deque[Command] = deque()
        self.waiting: Collection[object] = self._queue
        """Not empty when a boundary has to take commands."""
        self._came = threading.Event()
        self._close_gate = close_gate
        self._open_gate = open_gate

    def offer(self, command: Command) -> None:
        """Queue a command for the next boundary. Thread-safe."""
        self._queue.append(command)
        self._came.set()
        self._close_gate()

    def take(self) -> list[Command]:
        """Return the commands queued since the last call; without one it takes about 50 ns."""
        if not self._queue:
            return []
        # Cleared before emptying: a command queued in between sets it again.
        self._came.clear()
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        if not self._queue:
            self._open_gate()
        return taken

    def put_back(self, commands: Sequence[Command]) -> None:
        """Keep commands for the next boundary."""
        if commands:
            self._queue.extendleft(reversed(commands))
            self._close_gate()

    def wait(self, timeout_s: float) -> list[Command]:
        """Return the commands that are queued within `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()
        return self.take()

    def may_leave(self) -> bool:
        """Return True if the training may leave its boundary."""
        return True

    def leave(self) -> None:
        """Record that an exception has left the boundary."""


ByteCounts = Mapping[str, float]  # by metric key


def empty_cache(before: ByteCounts, after: ByteCounts) -> str:
    """Return the message of an emptied cache."""
    if "memory/reserved" not in after:
        return (
            "Empty cache: a CPU run has no CUDA cache to empty; "
            f"process memory {_change(before, after, 'process/rss')}"
        )
    text = f"Empty cache: reserved {_change(before, after, 'memory/reserved')}"
    left = after["memory/reserved"]
    if left == 0:
        return f"{text}; nothing left"
    held = after["memory/allocated"]
    # torch counts cuBLAS workspaces as allocated, too: 32 MiB on an H100.
    text += f"; {format_bytes(left)} remain: {format_bytes(held)} in tensors and library workspaces"
    if left > held:
        text += f", {format_bytes(left - held)} free parts of blocks in use (fragmentation)"
    return text


def reset_peaks(before: ByteCounts, after: ByteCounts) -> str:
    """Return the message of reset peaks."""
    if "memory/peak_allocated" not in after:
        return f"Reset peak stats: peak process memory {_change(before, after, 'process/peak_rss')}"
    return (
        f"Reset peak stats: peak allocated {_change(before, after, 'memory/peak_allocated')}, "
        f"peak reserved {_change(before, after, 'memory/peak_reserved')}"
    )


def collect_garbage(objects: int, before: ByteCounts, after: ByteCounts) -> str:
    """Return the message of a garbage collection."""
    on_gpu = "memory/allocated" in after
    word, key = ("allocated", "memory/allocated") if on_gpu else ("process memory", "process/rss")
    return f"Collect garbage: {objects:,} objects freed; {word} {_change(before, after, key)}"


def memory_snapshot(name: str, size: int, first: int, last: int) -> str:
    """Return the message of a snapshot file; `last` is before `first` if no step has ended."""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if last < first:
        steps = f"step {first}, which did not finish"
    return f"Memory snapshot: {name}, {format_bytes(size)}, all allocations of {steps}"


def _change(before: ByteCounts, after: ByteCounts, key: str) -> str:
    return f"{format_bytes(before.get(key, 0))} → {format_bytes(after[key])}"


def profile(
    first: int,
    last: int,
    *,
    slower: float | None,
    held_s: float,
    early: str | None,
    size: int | None,
) -> str:
    """Return the message of a profile: its steps, its cost, and the size of its trace.

    `slower` is the additional time of a profiled step as a fraction of an unprofiled one; `held_s`
    is the time for which training was paused; `early` is why it has fewer steps than requested.
    """
    text = f"Profile: step {first}" if first == last else f"Profile: steps {first} to {last}"
    if slower is not None:
        percent = round(100 * slower)
        text += f", {percent}% slower than before" if percent > 0 else ", no slower than before"
    text += f"; training paused for {held_s:.2f} s"
    if early is not None:
        text += f"; it ended early: {early}"
    return text if size is None else f"{text}; trace of {format_bytes(size)}"
