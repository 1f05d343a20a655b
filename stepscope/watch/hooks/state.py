"""What the captures gather between two optimizer steps, and which thread they listen to."""

from __future__ import annotations

import sys
import threading
from typing import Any, Protocol

from stepscope.watch.hooks.by_hand import ByHand
from stepscope.watch.hooks.clips import Clips
from stepscope.watch.hooks.parties import Parties, Reading, summed
from stepscope.watch.hooks.passes import Feed
from stepscope.watch.hooks.times import Times


class Live(Protocol):
    """What the hooks need of a run under way (`stepscope/live_run.py`)."""

    @property
    def recorder(self) -> Any:
        """The run's Recorder."""

    def boundary(self) -> float:
        """Serve commands; return the seconds that took. Raises what stops the script."""

    def train_on(self, cuda_index: int | None) -> None:
        """Hear on which device the script trains."""


class State:
    """Written by one thread, the one that steps the optimizers; others are ignored.

    The first thread seen is a guess; the first optimizer step settles it, until that thread ends.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.recorder = live.recorder
        self.thread = 0
        """Identity of the training thread; 0 while there is none."""
        self._owner: threading.Thread | None = None
        self._closed = False

        self.step = 0
        """The step counter: the largest count of steps among the optimizers."""
        self.stepped = 0
        """Calls of the optimizer hook."""
        self.backwards = 0
        """Calls of `backward()`, of any kind."""
        self.in_backward = False

        self.loss: Reading = None
        """Sum of the scalars on which `backward()` was called for the step to come."""
        self.loss_terms = 0
        self.parties = Parties()
        """The optimizers; where they are several, they keep the losses, each its own."""
        self.clips = Clips()
        self.amp_scale: Reading = None
        """Set while a GradScaler steps an optimizer."""
        self.amp_skipped = 0
        self.uses_amp = False
        self.feed = Feed(lambda ended, number, ended_s: None)
        """The batches of DataLoaders; `data.py` puts them in."""
        self.times = Times(self)
        self.by_hand = ByHand(self)
        self.data_wait_s = 0.0
        self.idle_s = 0.0
        """Time since the last step that is not step time: commands, pauses, evaluation."""
        self.evaluation: tuple[float, float, int] | None = None
        """Begin, end so far, and `backwards` at that time, of an evaluation not yet in `idle_s`."""

    def claim(self, *, by_step: bool = False) -> bool:
        """Say whether the calling thread, which is not the training thread, is so from now on."""
        if self._closed or (by_step and self.in_backward):
            return False
        moves = by_step and self.stepped == 0
        if self._owner is not None and self._owner.is_alive() and not moves:
            return False
        self._owner, self.thread = threading.current_thread(), threading.get_ident()
        return True

    def exclude(self, began_s: float, ended_s: float) -> None:
        """This was evaluation, not part of the step."""
        if self.evaluation is not None and self.evaluation[2] == self.backwards:
            began_s = min(began_s, self.evaluation[0])
        else:
            self.close_evaluation()
        self.evaluation = began_s, ended_s, self.backwards

    def end_evaluation(self, now_s: float) -> None:
        """Training fetches a batch: what came since the evaluation's last one belonged to it."""
        if self.evaluation is not None and self.evaluation[2] == self.backwards:
            self.evaluation = self.evaluation[0], now_s, self.backwards
        self.close_evaluation()

    def close_evaluation(self) -> None:
        """Count the evaluation, as far as it is known, as no step time."""
        if self.evaluation is not None:
            self.idle_s += self.evaluation[1] - self.evaluation[0]
            self.evaluation = None

    def close(self) -> None:
        """Listen to no thread any more."""
        self._closed, self.thread = True, 0

    def add_loss(self, value: Reading) -> None:
        """Add the value of a `backward()` to the loss of the step to come."""
        if self.loss is None:
            self.loss, self.loss_terms = value, 1
        else:
            self.loss, self.loss_terms = summed(self.loss, value), self.loss_terms + 1

    def take_loss(self, optimizer: Any) -> tuple[Reading, int]:
        """The optimizer uses its gradients, or drops them: return the loss that they are of."""
        loss, terms = self.loss, self.loss_terms
        self.loss = None
        if self.parties.sums:
            if loss is not None:
                self.parties.put(None, loss, terms)
            return self.parties.take(optimizer)
        return loss, terms

    def drop_loss(self, optimizer: Any) -> None:
        """The optimizer's gradients are cleared; those of others stay."""
        self.loss = None
        if self.parties.sums:
            self.parties.clear(optimizer)


def reading(tensor: Any) -> Reading:
    """Return the value of a one-element tensor if it is on the CPU, else itself, detached.

    Nothing waits. A CPU value is read at once because the script may change it in place; a CUDA
    tensor inside a graph's capture, or on any other device, is None.
    """
    if tensor.is_cpu:
        return float(tensor.item())
    if tensor.is_cuda and not sys.modules["torch"].cuda.is_current_stream_capturing():
        return tensor.detach()
    return None
