"""State that all hooks share, and the steps of scripts without an optimizer."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from stepscope.session.script_session import ScriptSession
from stepscope.watch.hooks.attribution import (
    ClipGradCalls,
    LossAttribution,
    ScalarValue,
    some_parameters,
    summed,
)
from stepscope.watch.hooks.copies import attach_copies
from stepscope.watch.hooks.learning import LearningObserver
from stepscope.watch.hooks.patching import HookGuard
from stepscope.watch.hooks.settings import SettingHooks
from stepscope.watch.hooks.step_timing import StepTimer

TRIAL_BACKWARDS = 8
"""Calls of `backward()` without an optimizer that are no steps: an optimizer may follow."""


class HookState:
    """State that only the training thread writes, which steps the optimizers.

    Before the first optimizer step the training thread is the first thread that fetches a batch or
    calls `backward()`. After its end another thread may replace it.
    """

    def __init__(self, session: ScriptSession, applied: SettingHooks | None = None) -> None:
        self.session = session
        self.applied = applied
        self.recorder: Any = session.recorder
        self.thread = 0  # Id of the training thread; 0 without one.
        self._owner: threading.Thread | None = None
        self._closed = False

        self.step = 0  # The latest step; optimizers that step in turn within it share it.
        self.stepped = 0  # Calls of the optimizer hook.
        self.in_backward = False
        self.on_cuda = False
        self._has_begun = False

        self.loss: ScalarValue = None  # Sum of the losses for the next step.
        self.loss_terms = 0
        self.attribution = LossAttribution()  # Several optimizers have separate losses.
        self.clips = ClipGradCalls()
        self.amp_scale: ScalarValue = None  # Set while a GradScaler steps an optimizer.
        self.amp_skipped = 0
        self.uses_amp = False
        self.times = StepTimer(self.recorder)
        self.training = session.observer.thread
        self.learning = LearningObserver(session.observer.facts, session.parts)
        self.manual_steps = ManualSteps(self)

    def claim(self, *, by_step: bool = False) -> bool:
        """Make the calling thread the training thread if possible; return True on success."""
        if self._closed or (by_step and self.in_backward):
            return False
        moves = by_step and self.stepped == 0
        if self._owner is not None and self._owner.is_alive() and not moves:
            return False
        self._owner = threading.current_thread()
        self.thread = threading.get_ident()
        return True

    def train_on(self, device: Any) -> None:
        """Set the device of the run (None: the CPU) at the first step.

        Called for a second time if an optimizer follows steps without one. A known GPU remains.
        """
        cuda_index = device.index if device is not None and device.type == "cuda" else None
        if self.on_cuda or (self._has_begun and cuda_index is None):
            return
        self._has_begun = True
        self.session.train_on(cuda_index)
        if cuda_index is not None:
            self.on_cuda = True
            torch = sys.modules["torch"]
            copies = HookGuard("perf/h2d").call(attach_copies, torch, lambda: self.thread)
            self.times.copies = copies

    def close(self) -> None:
        self._closed = True
        self.thread = 0

    def register(self, optimizer: Any) -> None:
        """Add an optimizer at its construction, or, such as a copy, at its first step."""
        if not self.attribution.made:
            self.times.forget()  # calls of `backward()` before it were no steps
            self.session.optimizer_steps = self.step
        self.learning.made(optimizer)
        self.attribution.register(optimizer)

    def add_loss(self, value: ScalarValue) -> None:
        if self.loss is None:
            self.loss, self.loss_terms = value, 1
        else:
            self.loss, self.loss_terms = summed(self.loss, value), self.loss_terms + 1

    def drop_cleared_loss(self) -> None:
        """Discard the loss of a batch whose gradients the script has set to None."""
        if self.attribution.made and all(
            parameter.grad is None
            for optimizer in list(self.attribution.alive.values())
            for parameter in some_parameters(optimizer)
        ):
            self.loss = None

    def take_loss(self, optimizer: Any) -> tuple[ScalarValue, int]:
        """Return and reset the optimizer's loss and the number of its terms."""
        loss, terms = self.loss, self.loss_terms
        self.loss = None
        if self.attribution.sums:
            if loss is not None:
                self.attribution.put(None, loss, terms)
            return self.attribution.take(optimizer)
        return loss, terms

    def drop_loss(self, optimizer: Any) -> None:
        """Discard the loss of an optimizer whose gradients are cleared."""
        self.loss = None
        if self.attribution.sums:
            self.attribution.clear(optimizer)


class ManualSteps:
    """Counts calls of `backward()` as steps while the script has no optimizer.

    The first TRIAL_BACKWARDS calls are not recorded.
    """

    def __init__(self, state: HookState) -> None:
        self._state = state
        self.backwards = 0

    @property
    def is_certain(self) -> bool:
        """True once calls of `backward()` are steps."""
        return self.backwards > TRIAL_BACKWARDS

    def after_backward(self, root: Any) -> None:
        """Record a step after `root.backward()`."""
        state = self._state
        state.clips.calls.clear()  # the norm of a step by hand is not recorded
        if state.recorder.step != state.step:  # the script calls `Tracker.step`
            state.loss = None
            return
        row: dict[str, Any] = {}
        state.times.add(row, time.perf_counter())
        self.backwards += 1
        if not self.is_certain:
            if self.backwards == TRIAL_BACKWARDS:
                state.loss = None
            return
        if state.step == 0:
            if isinstance(root, list | tuple) and len(root) == 1:
                root = root[0]
            state.train_on(getattr(root, "device", None))
        state.step = self.backwards
        if state.times.feed.epoch is not None:
            row["train/epoch"] = float(state.times.feed.epoch)
        if state.loss is not None:
            row["train/loss"] = state.loss
        state.loss = None
        state.recorder.log(state.step, row)
