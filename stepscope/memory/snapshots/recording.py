"""MEMORY_SNAPSHOT: torch's history of CUDA allocations over some whole steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_replace
from stepscope.memory.snapshots.labels import Labels
from stepscope.recorder.recorder import Command

STEPS, STEPS_LIMIT = 1, 50
"""Steps recorded where nothing is said, and at most."""
ENTRIES = 100_000
"""Actions of the allocator kept, the newest, some KB each; torch's own default has no bound."""


def steps_refusal(command: Command) -> str | None:
    """Say why so many steps cannot be recorded; None where they can."""
    steps = command.args.get("steps", STEPS)
    if type(steps) is int and 1 <= steps <= STEPS_LIMIT:
        return None
    return f"steps must be a whole number from 1 to {STEPS_LIMIT}, got {repr(steps)[:40]}"


class SnapshotRecording:
    """A history recorded from now, after `after_step`, until `write`."""

    def __init__(self, command: Command, after_step: int) -> None:
        self.command = command
        self.after_step = after_step
        self.last_step: int = after_step + command.args.get("steps", STEPS)
        torch = sys.modules["torch"]
        self._memory: Any = torch.cuda.memory
        # A script may record a history itself: it is written as it is, and goes on.
        self._ours = not torch._C._cuda_isHistoryEnabled()
        self.labels = Labels()
        if self._ours:
            self._memory._record_memory_history(context="all", stacks="python", max_entries=ENTRIES)

    def write(self, path: Path) -> None:
        """Write what was recorded, in the form of https://pytorch.org/memory_viz, and stop.

        The file is there once it is whole: an error, such as a full disk, leaves none.
        """
        try:
            with atomic_replace(path, durable=False) as part:
                self._memory._dump_snapshot(part.name)
        finally:
            if self._ours:
                self._memory._record_memory_history(enabled=None)
            self.labels.end()
