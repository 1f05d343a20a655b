"""The page's buttons that act on the memory of a training: caches, peaks, garbage, snapshots."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from stepscope.diagnosis import command_results as results
from stepscope.recording.recorder import Command, CommandName, Recorder

SNAPSHOT_ENTRIES = 100_000
"""Allocations kept of one step, some KB each; torch's own default has no bound."""

Handler = Callable[[Command], None]


class Memory(Protocol):
    """The memory that a training uses: torch's CUDA allocator, or on a CPU this process."""

    @property
    def on_gpu(self) -> bool:
        """Say whether there is a CUDA allocator to act on."""

    def memory(self) -> Mapping[str, float]:
        """Return the bytes in use by metric key."""

    def empty_cache(self) -> None:
        """Give unused cached blocks back to the driver."""

    def reset_peaks(self) -> None:
        """Start the allocator's peaks again from the current values."""


class MemoryCommands:
    """Called by the training thread, as `CommandServer`, which does the rest."""

    def __init__(
        self,
        recorder: Recorder,
        memory: Memory,
        reset_process_peak: Callable[[], tuple[float, float]],
    ) -> None:
        self._recorder = recorder
        self._memory = memory
        self._reset_process_peak = reset_process_peak
        self._snapshot: _Snapshot | None = None
        self.handlers: Mapping[CommandName, Handler] = {
            CommandName.EMPTY_CACHE: self._empty_cache,
            CommandName.RESET_PEAKS: self._reset_peaks,
            CommandName.COLLECT_GARBAGE: self._collect_garbage,
            CommandName.MEMORY_SNAPSHOT: self._memory_snapshot,
        }

    @property
    def snapshot_command(self) -> Command | None:
        """The command whose snapshot is being taken, if any."""
        return self._snapshot.command if self._snapshot is not None else None

    def end_snapshot(self, command: Command) -> None:
        """Write the snapshot that is being taken, and finish its command."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        first, last = snapshot.after_step + 1, self._recorder.step
        path = self._recorder.folder / f"snapshot-step-{max(first, last)}.pickle"
        snapshot.write(str(path))
        size = path.stat().st_size
        text = results.memory_snapshot(path.name, size, first, last)
        self._recorder.finish(command, text, path=path.name, bytes=size, first=first, last=last)

    def _empty_cache(self, command: Command) -> None:
        before = self._memory.memory()
        self._memory.empty_cache()
        after = self._memory.memory()
        text = results.empty_cache(before, after)
        self._recorder.finish(command, text, before=before, after=after)

    def _reset_peaks(self, command: Command) -> None:
        before = dict(self._memory.memory())
        self._memory.reset_peaks()
        after = dict(self._memory.memory())
        before["process/peak_rss"], after["process/peak_rss"] = self._reset_process_peak()
        text = results.reset_peaks(before, after)
        self._recorder.finish(command, text, before=before, after=after)

    def _collect_garbage(self, command: Command) -> None:
        before = self._memory.memory()
        objects = gc.collect()
        after = self._memory.memory()
        text = results.collect_garbage(objects, before, after)
        self._recorder.finish(command, text, before=before, after=after, objects=objects)

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
            self.end_snapshot(command)
        else:
            self._recorder.put_back([command])


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
