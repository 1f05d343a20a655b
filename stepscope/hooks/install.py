"""Attaches every capture as soon as the script has imported torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType

from stepscope.hooks import amp, data, gradient, loss, optimizer
from stepscope.hooks.after_import import AfterImport
from stepscope.hooks.patches import Patches
from stepscope.hooks.state import Live, State

log = logging.getLogger(__name__)

Attach = Callable[[ModuleType, State, Patches], None]

# Each capture with what is missing where it cannot attach.
CAPTURES: tuple[tuple[str, Attach], ...] = (
    ("all training metrics", optimizer.attach),
    ("train/loss", loss.attach),
    ("train/grad_norm", gradient.attach),
    ("train/amp_scale and train/amp_skipped", amp.attach),
    ("perf/data_wait, perf/samples_per_sec and train/epoch", data.attach),
)


class Hooks:
    """The captures of one run, waiting for torch or attached to it."""

    def __init__(self, live: Live) -> None:
        self._state = State(live)
        self._patches = Patches()
        self._import = AfterImport("torch", self._attach)
        self._import.start()

    def remove(self) -> None:
        """Put torch back as it was; nothing is recorded any more."""
        self.leave()
        _installed[:] = [hooks for hooks in _installed if hooks is not self]
        self._patches.undo()

    def leave(self) -> None:
        """In a forked child: record nothing."""
        self._import.stop()
        self._state.close()

    def _attach(self, torch: ModuleType) -> None:
        for metrics, attach in CAPTURES:
            try:
                attach(torch, self._state, self._patches)
            except Exception as error:  # noqa: BLE001 - another torch; the script must run on
                log.warning("stepscope: %s will be missing, torch %s has no place for it (%s)",
                            metrics, getattr(torch, "__version__", "?"), error)  # fmt: skip


def install(live: Live) -> Hooks:
    """Capture what the script trains, once it imports torch; see the package's docstring."""
    hooks = Hooks(live)
    _installed.append(hooks)
    return hooks


_installed: list[Hooks] = []


def _leave_all() -> None:
    while _installed:
        _installed.pop().leave()


os.register_at_fork(after_in_child=_leave_all)
