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
    """One command for this run; `args` is as the page gave it: check before use."""

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
        value = json.loads(args)
        # msgspec cannot encode one half of a surrogate pair.
        return dict(json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class LocalCommandQueue:
    """The commands of a process that is alone in its run: the next boundary serves them.

    `close_gate` is called after a command came, `open_gate` after the last was taken.
    """

    def __init__(self, close_gate: Callable[[], None], open_gate: Callable[[], None]) -> None:
        self._queue: deque[Command] = deque()
        self.waiting: Collection[object] = self._queue
        """Not empty when a boundary has to look at the commands."""
        self._came = threading.Event()
        self._close_gate = close_gate
        self._open_gate = open_gate

    def offer(self, command: Command) -> None:
        """Have the next boundary serve a command; called by the writer's thread."""
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
        """Keep commands for the next boundary: they need a whole step, or follow a stop."""
        if commands:
            self._queue.extendleft(reversed(commands))
            self._close_gate()

    def wait(self, timeout_s: float) -> list[Command]:
        """Wait for a command, at most `timeout_s`."""
        self._came.wait(timeout_s)
        self._came.clear()
        return self.take()

    def may_leave(self) -> bool:
        """Return whether the training may leave its boundary; if not, ask again."""
        return True

    def leave(self) -> None:
        """Report that an exception has left the boundary."""


ByteCounts = Mapping[str, float]  # by metric key


def empty_cache(before: ByteCounts, after: ByteCounts) -> str:
    """Return the result of emptying the cache."""
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
    # torch counts as allocated what it gives to cuBLAS, too: 32 MiB on an H100.
    text += f"; {format_bytes(left)} remain: {format_bytes(held)} in tensors and library workspaces"
    if left > held:
        text += f", {format_bytes(left - held)} free parts of blocks in use (fragmentation)"
    return text


def reset_peaks(before: ByteCounts, after: ByteCounts) -> str:
    """Return the result of a reset of the peaks."""
    if "memory/peak_allocated" not in after:
        return f"Reset peak stats: peak process memory {_change(before, after, 'process/peak_rss')}"
    return (
        f"Reset peak stats: peak allocated {_change(before, after, 'memory/peak_allocated')}, "
        f"peak reserved {_change(before, after, 'memory/peak_reserved')}"
    )


def collect_garbage(objects: int, before: ByteCounts, after: ByteCounts) -> str:
    """Return the result of a garbage collection."""
    on_gpu = "memory/allocated" in after
    word, key = ("allocated", "memory/allocated") if on_gpu else ("process memory", "process/rss")
    return f"Collect garbage: {objects:,} objects freed; {word} {_change(before, after, key)}"


def memory_snapshot(name: str, size: int, first: int, last: int) -> str:
    """Return the steps of a snapshot file; `last` is before `first` if no step has ended."""
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if last < first:
        steps = f"step {first}, which did not finish"
    return f"Memory snapshot: {name}, {format_bytes(size)}, all allocations of {steps}"


def combined(command: Command, results: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return the result on all ranks, from the bytes `before` and `after` on each.

    None on a CPU, and for a command that is not about memory.
    """
    if command.name not in _LESS:
        return None
    words, key = _LESS[command.name]
    less = {
        rank: one["before"].get(key, 0) - one["after"][key]
        for rank, one in results.items()
        if key in one.get("after", {})
    }
    if len(less) < 2:
        return None
    most = max(less, key=lambda rank: less[rank])
    if less[most] <= 0:
        return words.format(f"{len(less)} ranks", "nothing")
    total = format_bytes(sum(max(0, freed) for freed in less.values()))
    amount = f"{total} in all, rank {most} most with {format_bytes(less[most])}"
    return words.format(f"{len(less)} ranks", amount)


_LESS = {
    CommandName.EMPTY_CACHE: ("Empty cache: {} gave back {}", "memory/reserved"),
    CommandName.COLLECT_GARBAGE: ("Collect garbage: {} freed {}", "memory/allocated"),
    CommandName.RESET_PEAKS: (
        "Reset peak stats: on {} the peak allocated is lower by {}",
        "memory/peak_allocated",
    ),
}


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
    """Return the steps of a profile, its cost, and the size of its trace.

    `slower` is how much longer a profiled step took, as a fraction of one before; `held_s` is the
    time for which training stood still; `early` is why it has fewer steps than were asked for.
    """
    text = f"Profile: step {first}" if first == last else f"Profile: steps {first} to {last}"
    if slower is not None:
        percent = round(100 * slower)
        text += f", {percent} % slower than before" if percent > 0 else ", no slower than before"
    text += f"; training paused for {held_s:.2f} s"
    if early is not None:
        text += f"; it ended early: {early}"
    return text if size is None else f"{text}; trace of {format_bytes(size)}"
