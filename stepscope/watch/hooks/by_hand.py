"""Steps of scripts without an optimizer (`w -= lr * w.grad`): every outermost `backward()`.

At the first `backward()` it is not known whether an optimizer will be made. So the first steps are
held back until there are HELD of them, or the script ends. They are dropped where an optimizer is
made before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stepscope.common.clock import clock

if TYPE_CHECKING:
    from stepscope.watch.hooks.state import State

HELD = 8
"""Calls of `backward()` without an optimizer after which none is expected."""


class ByHand:
    """Makes steps of calls of `backward()`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._held: list[tuple[float, dict[str, Any]]] = []
        self._device: Any = None
        self._is_certain = False

    def after_backward(self, root: Any) -> None:
        """Record a step; `root` is what `backward()` was called on."""
        row: dict[str, Any] = {}
        state = self._state
        if state.recorder.step != state.step:  # the script counts its steps itself
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
        """Let the page's commands act, where it is certain that this is a step."""
        return self._state.session.boundary() if self._is_certain else 0.0

    def release(self) -> None:
        """Record what was held back: no optimizer is expected any more."""
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
        """Add the norm to the row of the `backward()` before it, which may be recorded already."""
        state = self._state
        norm = state.clips.take(None, state.parties)
        if norm is None:
            return
        if self._held:
            self._held[-1][1]["train/grad_norm"] = norm
        elif self._is_certain:
            state.recorder.log(state.step, {"train/grad_norm": norm})

    def drop(self) -> None:
        """Forget what was held back: an optimizer was made, so these were no steps."""
        if self._held:
            self._state.times.forget()
        self._held = []

    def give_back(self) -> None:
        """Add the losses held back to the first step of an optimizer whose making was not seen."""
        for _, row in self._held:
            if "train/loss" in row:
                self._state.add_loss(row["train/loss"])
        self.drop()
