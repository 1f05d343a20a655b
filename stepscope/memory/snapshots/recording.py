"""MEMORY_SNAPSHOT: record CUDA allocations of some whole steps, labeled by phase."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_replace
from stepscope.profiling import phase_ranges
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER
from stepscope.store.recorder import Command

log = logging.getLogger(__name__)

PREFIX = "phase="  # Begins each label, such as "phase=forward".
STEPS, STEPS_LIMIT = 1, 50  # Number of recorded steps: the default, and the maximum.
MAX_ENTRIES = 100_000  # The newest actions, some KB each; torch's default has no bound.
_AFTER = {DATA: FORWARD, FORWARD: FORWARD, BACKWARD: OPTIMIZER, OPTIMIZER: FORWARD}
"""The label after a phase, until the next one begins: a script names only data and backward."""


class AllocationLabeler:
    """Labels allocations until `end`, which restores the script's label. Training thread only."""

    def __init__(self) -> None:
        memory: Any = sys.modules["torch"].cuda.memory
        self._set: Callable[[str], None] | None = None
        try:
            self._before: str = memory._get_memory_metadata()
            self._set = memory._set_memory_metadata
        except AttributeError:
            return
        phase_ranges.label(self._labeled)
        self._put_in_backward(f"{PREFIX}{BACKWARD}")
        self.begin_step()

    def begin_step(self) -> None:
        """Label allocations as those of the forward pass: a step begins."""
        self._put(FORWARD)

    def end(self) -> None:
        """Stop labeling."""
        if self._set is not None:
            phase_ranges.label(None)
            self._put_in_backward("")
            self._set(self._before)
            self._set = None

    @contextmanager
    def _labeled(self, name: str) -> Iterator[None]:
        self._put(name)
        try:
            yield
        finally:
            self._put(_AFTER[name])

    def _put(self, name: str) -> None:
        if self._set is not None:
            self._set(f"{PREFIX}{name}")

    def _put_in_backward(self, text: str) -> None:
        """Set the label of the thread that computes gradients on the current device."""
        torch, put = sys.modules["torch"], self._set
        if put is None:
            return
        try:
            with torch.inference_mode(False), torch.enable_grad():
                number = torch.zeros((), device="cuda", requires_grad=True)
                product = number * 1
                product.register_hook(lambda gradient: put(text))
                torch.autograd.grad(product, number)
        except Exception:  # a label is not worth the snapshot
            log.warning("stepscope: backward passes are not labeled", exc_info=True)


def steps_refusal(command: Command) -> str | None:
    """Return why the requested steps cannot be recorded; None if they can."""
    steps = command.args.get("steps", STEPS)
    if type(steps) is int and 1 <= steps <= STEPS_LIMIT:
        return None
    return f"steps must be a whole number from 1 to {STEPS_LIMIT}, got {repr(steps)[:40]}"


class SnapshotRecording:
    """An allocation history recorded from now, after `after_step`, until `write`."""

    def __init__(self, command: Command, after_step: int) -> None:
        self.command = command
        self.after_step = after_step
        self.last_step: int = after_step + command.args.get("steps", STEPS)
        torch = sys.modules["torch"]
        self._memory: Any = torch.cuda.memory
        # A script may record a history itself: it is written as it is, and continues.
        self._ours = not torch._C._cuda_isHistoryEnabled()
        self.labels = AllocationLabeler()
        if self._ours:
            self._memory._record_memory_history(
                context="all", stacks="python", max_entries=MAX_ENTRIES
            )

    def write(self, path: Path) -> None:
        """Write the history for https://pytorch.org/memory_viz, atomically; stop recording."""
        try:
            with atomic_replace(path, durable=False) as part:
                self._memory._dump_snapshot(part.name)
        finally:
            if self._ours:
                self._memory._record_memory_history(enabled=None)
            self.labels.end()
