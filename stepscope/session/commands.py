"""Serves the page's buttons at a step boundary: the only place where they touch a training.

The built-in trainer and a watched script share it; what differs between them comes in as `Memory`
and as handlers of their own.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from stepscope.formatting import format_bytes
from stepscope.recording.recorder import Command, CommandName, Recorder
from stepscope.run import RunStatus
from stepscope.sampling.allocator import Readings

log = logging.getLogger(__name__)

PAUSED_POLL_S = 0.1  # how long a paused run may miss that it has to end
MARK_LENGTH = 200
SNAPSHOT_ENTRIES = 100_000
"""Allocations kept of one step, some KB each; torch's own default has no bound."""

Bytes = Mapping[str, float]  # by metric key
Handler = Callable[[Command], None]


class Memory(Protocol):
    """The memory that a training uses: torch's CUDA allocator, or on a CPU this process."""

    @property
    def on_gpu(self) -> bool:
        """Say whether there is a CUDA allocator to act on."""

    def memory(self) -> Bytes:
        """Return the bytes in use by metric key."""

    def empty_cache(self) -> None:
        """Give unused cached blocks back to the driver."""

    def reset_peaks(self) -> None:
        """Start the allocator's peaks again from the current values."""


class CommandServer:
    """Answers the commands of one run; called by the training thread.

    `own` holds the handlers that only this kind of run has, STOP among them; `while_paused` is
    called again and again while the run is paused and may raise to end it.
    """

    def __init__(
        self,
        recorder: Recorder,
        memory: Memory,
        *,
        readings: Readings,
        reset_process_peak: Callable[[], tuple[float, float]],
        own: Mapping[CommandName, Handler],
        while_paused: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._memory = memory
        self._readings = readings
        self._reset_process_peak = reset_process_peak
        self._while_paused = while_paused
        self._paused = False
        self._snapshot: _Snapshot | None = None
        self._handlers: dict[CommandName, Handler] = {
            CommandName.PAUSE: self._pause,
            CommandName.RESUME: self._resume,
            CommandName.EMPTY_CACHE: self._empty_cache,
            CommandName.RESET_PEAKS: self._reset_peaks,
            CommandName.COLLECT_GARBAGE: self._collect_garbage,
            CommandName.MARK: self._mark,
            CommandName.MEMORY_SNAPSHOT: self._memory_snapshot,
            **own,
        }

    def supported_commands(self) -> list[CommandName]:
        """Return the commands that have an effect here, for run.json."""
        return [
            name
            for name in CommandName
            if name in self._handlers
            and (self._memory.on_gpu or name is not CommandName.MEMORY_SNAPSHOT)
        ]

    def serve(self, flush: Callable[[], None]) -> float:
        """Serve what was asked since the last boundary; return the seconds the commands took.

        `flush` records the steps still under way, so that a marker stands after them. Stays here
        while the run is paused. Raises only what the handler of STOP and `while_paused` raise.
        """
        if self._readings.wanted:
            self._readings.serve()
        asked = deque(self._recorder.take_commands())
        if not asked:
            return 0.0
        began = time.perf_counter()
        try:
            flush()
            while True:
                while asked:
                    self._serve_one(asked.popleft())
                if not self._paused:
                    return time.perf_counter() - began
                self._while_paused()
                asked.extend(self._recorder.wait_command(PAUSED_POLL_S))
                if self._readings.wanted:
                    self._readings.serve()
        except BaseException:  # a stop, or Ctrl-C; the script may go on all the same
            self._leave_pause()
            self._recorder.put_back(asked)
            raise

    def close(self) -> None:
        """End what needs another step: none will come."""
        if self._snapshot is not None:
            self._guarded(self._end_snapshot, self._snapshot.command)

    def _serve_one(self, command: Command) -> None:
        handler = self._handlers.get(command.name)
        if handler is None:
            text = f"{_label(command)}: this run does not answer it"
            self._recorder.finish(command, text, ok=False)
        elif command.name is CommandName.STOP:
            self._leave_pause()
            handler(command)
        else:
            self._guarded(handler, command)

    def _guarded(self, handler: Handler, command: Command) -> None:
        try:
            with self._readings.held():
                handler(command)
        except Exception as error:  # a button must not end a training
            log.warning("stepscope: %s failed", command.name, exc_info=True)
            text = f"{_label(command)}: failed ({type(error).__name__}: {error})"
            self._recorder.finish(command, text, ok=False)

    def _pause(self, command: Command) -> None:
        if self._paused:
            self._recorder.finish(command, "Pause: the run is paused already", ok=False)
            return
        self._paused = True
        self._recorder.set_status(RunStatus.PAUSED)
        self._recorder.finish(command, f"Pause: after step {self._recorder.step}")

    def _resume(self, command: Command) -> None:
        if not self._paused:
            self._recorder.finish(command, "Resume: the run is not paused", ok=False)
            return
        self._leave_pause()
        self._recorder.finish(command, "Resume")

    def _leave_pause(self) -> None:
        if self._paused:
            self._paused = False
            self._recorder.set_status(RunStatus.RUNNING)

    def _empty_cache(self, command: Command) -> None:
        before = self._memory.memory()
        self._memory.empty_cache()
        after = self._memory.memory()
        self._recorder.finish(command, empty_cache_text(before, after), before=before, after=after)

    def _reset_peaks(self, command: Command) -> None:
        before = dict(self._memory.memory())
        self._memory.reset_peaks()
        after = dict(self._memory.memory())
        before["process/peak_rss"], after["process/peak_rss"] = self._reset_process_peak()
        text = reset_peaks_text(before, after)
        self._recorder.finish(command, text, before=before, after=after)

    def _collect_garbage(self, command: Command) -> None:
        before = self._memory.memory()
        objects = gc.collect()
        after = self._memory.memory()
        key = "memory/allocated" if "memory/allocated" in after else "process/rss"
        word = "allocated" if key == "memory/allocated" else "process memory"
        text = f"Collect garbage: {objects:,} objects freed; {word} {_change(before, after, key)}"
        self._recorder.finish(command, text, before=before, after=after, objects=objects)

    def _mark(self, command: Command) -> None:
        text = str(command.args.get("text", "")).strip()[:MARK_LENGTH]
        self._recorder.finish(command, text or "Mark", after=self._memory.memory())

    def _memory_snapshot(self, command: Command) -> None:
        """Begin a history at this boundary, and end it at one where a step has passed."""
        if not self._memory.on_gpu:
            text = "Memory snapshot: a CPU run has no CUDA allocator to take it of"
            self._recorder.finish(command, text, ok=False)
        elif self._snapshot is None:
            self._snapshot = _Snapshot(command, self._recorder.step)
            self._recorder.put_back([command])
        elif self._snapshot.command is not command:
            text = "Memory snapshot: one is being taken already"
            self._recorder.finish(command, text, ok=False)
        elif self._recorder.step > self._snapshot.after_step:
            self._end_snapshot(command)
        else:
            self._recorder.put_back([command])

    def _end_snapshot(self, command: Command) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        first, last = snapshot.after_step + 1, self._recorder.step
        path = self._recorder.folder / f"snapshot-step-{max(first, last)}.pickle"
        snapshot.write(str(path))
        size = path.stat().st_size
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        if last < first:
            steps = f"step {first}, which the run did not end"
        text = f"Memory snapshot: {path.name}, {format_bytes(size)}, all allocations of {steps}"
        self._recorder.finish(command, text, path=path.name, bytes=size, first=first, last=last)


class _Snapshot:
    """Torch's history of CUDA allocations, recorded from now until `write`."""

    def __init__(self, command: Command, after_step: int) -> None:
        self.command = command
        self.after_step = after_step
        torch = sys.modules["torch"]
        self._memory: Any = torch.cuda.memory
        # A script may record a history itself: it is written as it is, and goes on.
        self._ours = not torch._C._cuda_isHistoryEnabled()
        if self._ours:
            self._memory._record_memory_history(
                context="all", stacks="python", max_entries=SNAPSHOT_ENTRIES
            )

    def write(self, path: str) -> None:
        """Write what was recorded, in the form of https://pytorch.org/memory_viz, and stop."""
        try:
            self._memory._dump_snapshot(path)
        finally:
            if self._ours:
                self._memory._record_memory_history(enabled=None)


def empty_cache_text(before: Bytes, after: Bytes) -> str:
    """What emptying the cache gave back, and what it could not."""
    if "memory/reserved" not in after:
        return (
            "Empty cache: a CPU run has no CUDA cache to empty; "
            f"process memory {_change(before, after, 'process/rss')}"
        )
    text = f"Empty cache: reserved {_change(before, after, 'memory/reserved')}"
    left = after["memory/reserved"]
    if left == 0:
        return f"{text}; nothing stays"
    held = after["memory/allocated"]
    free = left - held
    # torch counts as allocated what it gives to cuBLAS, too: 32 MiB on an H100.
    stays = (
        f"{format_bytes(left)} stay: {format_bytes(held)} held by tensors and library workspaces"
    )
    if free > 0:
        stays += f", {format_bytes(free)} free parts of blocks in use (fragmentation)"
    return f"{text}; {stays}"


def reset_peaks_text(before: Bytes, after: Bytes) -> str:
    """Where the peaks stood and start again."""
    if "memory/peak_allocated" not in after:
        return f"Reset peak stats: peak process memory {_change(before, after, 'process/peak_rss')}"
    return (
        f"Reset peak stats: peak allocated {_change(before, after, 'memory/peak_allocated')}, "
        f"peak reserved {_change(before, after, 'memory/peak_reserved')}"
    )


def _change(before: Bytes, after: Bytes, key: str) -> str:
    return f"{format_bytes(before.get(key, 0))} → {format_bytes(after[key])}"


def _label(command: Command) -> str:
    return command.name.replace("_", " ").capitalize()
