"""State that all hooks share, and the steps of scripts without an optimizer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from stepscope.common.clock import clock
from stepscope.session.script_session import ScriptSession
from stepscope.watch.hooks.attribution import ClipGradCalls, LossAttribution, ScalarValue, summed
from stepscope.watch.hooks.epochs import BatchTracker
from stepscope.watch.hooks.settings import SettingHooks
from stepscope.watch.hooks.step_timing import StepTimer

if TYPE_CHECKING:
    from stepscope.watch.hooks.step_timing import StepPhaseTimer


HELD = 8  # Number of `backward()` calls without an optimizer after which each call is a step.


class ManualSteps:
    """Counts calls of `backward()` as steps."""

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._held: list[tuple[float, dict[str, Any]]] = []
        self._device: Any = None
        self._is_certain = False

    def after_backward(self, root: Any) -> None:
        """Record a step after `root.backward()`."""
        row: dict[str, Any] = {}
        state = self._state
        if state.recorder.step != state.step:  # the script calls `Tracker.step`
            self._held = []
            state.clips.take(None, state.parties)
            state.loss = None
            return
        self._add_norm()
        self._state.times.add(row, time.perf_counter())
        if state.feed.epoch is not None:
            row["train/epoch"] = float(state.feed.epoch)
        if state.loss is not None:
            row["train/loss"] = state.loss
        state.loss = None
        self._held.append((clock.now(), row))
        if isinstance(root, list | tuple) and len(root) == 1:
            root = root[0]
        self._device = getattr(root, "device", None)
        if self._is_certain or len(self._held) >= HELD:
            self.release()

    def boundary(self) -> float:
        """Execute commands if this is certainly a step."""
        return self._state.session.boundary() if self._is_certain else 0.0

    def release(self) -> None:
        """Record the held rows, because no optimizer is expected."""
        state = self._state
        if state.parties.made or state.recorder.step != state.step:
            self._held = []
            return
        self._add_norm()
        held, self._held = self._held, []
        if held and not self._is_certain:
            self._is_certain = True
            self._state.times.begin(self._device)
        for ts, row in held:
            state.step += 1
            state.recorder.log(state.step, row, ts)

    def _add_norm(self) -> None:
        """Add the norm to the row of the last `backward()`, held or recorded."""
        state = self._state
        norm = state.clips.take(None, state.parties)
        if norm is None:
            return
        if self._held:
            self._held[-1][1]["train/grad_norm"] = norm
        elif self._is_certain:
            state.recorder.log(state.step, {"train/grad_norm": norm})

    def drop(self) -> None:
        """Discard the held rows, which an optimizer's construction showed to be no steps."""
        if self._held:
            self._state.times.forget()
        self._held = []

    def restore_losses(self) -> None:
        """Add the held losses to the first step of an optimizer without observed construction."""
        for _, row in self._held:
            if "train/loss" in row:
                self._state.add_loss(row["train/loss"])
        self.drop()


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
        self.backwards = 0  # Calls of `backward()`, of any kind.
        self.in_backward = False

        self.loss: ScalarValue = None  # Sum of the losses for the next step.
        self.loss_terms = 0
        self.parties = LossAttribution()  # The optimizers; several optimizers have separate losses.
        self.clips = ClipGradCalls()
        self.amp_scale: ScalarValue = None  # Set while a GradScaler steps an optimizer.
        self.amp_skipped = 0
        self.uses_amp = False
        self.feed = BatchTracker(lambda ended, number, ended_s: None)  # Batches of the DataLoaders.
        self.times = StepTimer(self)
        self.phases: StepPhaseTimer | None = None  # None outside a distributed job.
        self.by_hand = ManualSteps(self)
        self.data_wait_s = 0.0
        self.idle_s = 0.0
        """Time since the last step that the step time excludes: commands, pauses, evaluation."""
        self.evaluation: tuple[float, float, int] | None = None
        """Start, end so far, and `backwards` of an evaluation not yet in `idle_s`."""

    def claim(self, *, by_step: bool = False) -> bool:
        """Make the calling thread the training thread if possible; return True on success."""
        if self._closed or (by_step and self.in_backward):
            return False
        moves = by_step and self.stepped == 0
        if self._owner is not None and self._owner.is_alive() and not moves:
            return False
        self._owner, self.thread = threading.current_thread(), threading.get_ident()
        return True

    def exclude(self, began_s: float, ended_s: float) -> None:
        """Exclude the time of an evaluation from the step time."""
        if self.evaluation is not None and self.evaluation[2] == self.backwards:
            began_s = min(began_s, self.evaluation[0])
        else:
            self.close_evaluation()
        self.evaluation = began_s, ended_s, self.backwards

    def close_evaluation(self) -> None:
        """Subtract the evaluation so far from the step time."""
        if self.evaluation is not None:
            self.idle_s += self.evaluation[1] - self.evaluation[0]
            self.evaluation = None

    def close(self) -> None:
        self._closed, self.thread = True, 0

    def add_loss(self, value: ScalarValue) -> None:
        if self.loss is None:
            self.loss, self.loss_terms = value, 1
        else:
            self.loss, self.loss_terms = summed(self.loss, value), self.loss_terms + 1

    def take_loss(self, optimizer: Any) -> tuple[ScalarValue, int]:
        """Return and reset the optimizer's loss and the number of its terms."""
        loss, terms = self.loss, self.loss_terms
        self.loss = None
        if self.parties.sums:
            if loss is not None:
                self.parties.put(None, loss, terms)
            return self.parties.take(optimizer)
        return loss, terms

    def drop_loss(self, optimizer: Any) -> None:
        """Discard the loss of an optimizer whose gradients are cleared."""
        self.loss = None
        if self.parties.sums:
            self.parties.clear(optimizer)
