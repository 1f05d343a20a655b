"""Zero-code capture: what `stepscope watch` records of a script without calls of Stepscope.

`install(session)` is called before the script runs. It imports nothing: an import hook waits until
the script has imported torch, so that environment variables set before it still count, and then
wraps a handful of torch's functions:

| file             | wraps                                    | metrics                            |
|------------------|------------------------------------------|------------------------------------|
| `optimizer.py`   | the post hook of all optimizers' `step`  | a row a step, `train/lr`           |
| `loss.py`        | `torch.autograd.backward`, `zero_grad`,  | `train/loss`, `train/backwards`    |
|                  | `Optimizer.__init__`                     |                                    |
|                  | `GradScaler.scale`, `GradScaler.step`    | `train/amp_scale`, `…/amp_skipped` |
| `attribution.py` | `torch.nn.utils.clip_grad_norm_`         | `train/grad_norm`                  |
| `dataloader.py`  | `__next__` of the DataLoader's iterators | data wait, samples/s, epoch        |
| `step_timing.py` | `DistributedDataParallel.__init__` (jobs)| `perf/forward`, `perf/comm_wait`   |
| `h2d_copies.py`  | `to`, `cuda` of tensors (only CUDA)      | `perf/h2d`                         |

`state.py` has the shared state, and the steps of scripts without an optimizer. `step_timing.py`
also measures a step's times, `epochs.py` counts batches and epochs, `attribution.py` finds the
optimizer of a loss.

No wrapper waits for a GPU or changes a result. One that fails is logged once and disabled. They
work in the thread that steps the optimizers, not in forked children and DataLoader workers.
docs/watch.md lists the limits.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from stepscope.distributed.ddp_timing import DDP_METRICS
from stepscope.watch.hooks import attribution, dataloader, loss, optimizer, step_timing
from stepscope.watch.hooks.patching import HookGuard, PatchSet, PostImportHook
from stepscope.watch.hooks.state import HookState

if TYPE_CHECKING:
    from stepscope.session.script_session import ScriptSession

log = logging.getLogger(__name__)

CHILDREN_S = 0.5  # CPU time of child processes that may have been spent on training.

Attach = Callable[[ModuleType, HookState, PatchSet], None]


def _failed_allocations(torch: ModuleType, state: HookState, patches: PatchSet) -> None:
    state.session.oom.attach()


# Each capture with what is missing where it cannot attach.
CAPTURES: tuple[tuple[str, Attach], ...] = (
    ("all training metrics", optimizer.attach),
    ("train/loss", loss.attach),
    ("train/grad_norm", attribution.attach),
    ("train/amp_scale and train/amp_skipped", loss.attach_grad_scaler),
    ("perf/data_wait, perf/samples_per_sec and train/epoch", dataloader.attach),
    (DDP_METRICS, step_timing.attach),
    ("details of failed allocations", _failed_allocations),
)


class TorchHooks:
    """The hooks of one run, waiting for torch or installed in it."""

    def __init__(self, session: ScriptSession) -> None:
        self._state = HookState(session)
        self._patches = PatchSet()
        self._import = PostImportHook("torch", self._attach)
        self._has_torch = False
        self._import.start()

    def end(self) -> str | None:
        """Record the held rows at the script's end; without steps return the reason."""
        state = self._state
        HookGuard("the steps of a script without an optimizer").call(state.by_hand.release)
        if state.recorder.step or state.amp_skipped:
            return None
        return why_nothing(state, has_torch=self._has_torch)

    def remove(self) -> None:
        """Restore torch's functions; nothing more is recorded."""
        self.leave()
        _installed[:] = [hooks for hooks in _installed if hooks is not self]
        self._patches.undo()

    def leave(self) -> None:
        """In a forked child: record nothing."""
        self._import.stop()
        self._state.close()

    def _attach(self, torch: ModuleType) -> None:
        self._has_torch = True
        for metrics, attach in CAPTURES:
            try:
                attach(torch, self._state, self._patches)
            except Exception as error:  # noqa: BLE001 - another torch; the script must run on
                log.warning(
                    "stepscope: %s will be missing, torch %s has no place for it (%s)",
                    metrics,
                    getattr(torch, "__version__", "?"),
                    error,
                )


def why_nothing(state: HookState, *, has_torch: bool) -> str:
    """Return why no step was recorded of a script that has ended."""
    if not has_torch:
        why = "the script did not import torch"
    elif state.parties.made:
        why = "the script made an optimizer of torch, but its training thread never stepped one"
    else:
        why = "the script never called backward() in its training thread"
    text = f"No training step was seen: {why}."
    # Time of children that the script has waited for; the recorder starts none.
    if resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > CHILDREN_S:
        text += " What the processes that it started train is not recorded (docs/watch.md)."
    return text


def install(session: ScriptSession) -> TorchHooks:
    """Record the training of the script, once it imports torch."""
    hooks = TorchHooks(session)
    _installed.append(hooks)
    return hooks


_installed: list[TorchHooks] = []


def _leave_all() -> None:
    while _installed:
        _installed.pop().leave()


os.register_at_fork(after_in_child=_leave_all)
