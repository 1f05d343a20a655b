"""Zero-code capture: record the training of a script that does not call Stepscope.

`install(session)` wraps argparse (`config` of run.json) before the script runs. It does not import
torch, so that environment variables that the script sets before its import still take effect. An
import hook then wraps functions of torch:

| file             | wraps                                    | metrics                            |
|------------------|------------------------------------------|------------------------------------|
| `optimizer.py`   | the post hook of all optimizers' `step`  | a row a step, `train/lr`           |
|                  | `torch.nn.utils.clip_grad_norm_`         | `train/grad_norm`                  |
|                  | `DistributedDataParallel.__init__` (jobs)| `perf/forward`, `perf/comm_wait`   |
| `loss.py`        | `torch.autograd.backward`, `zero_grad`,  | `train/loss`, `train/backwards`    |
|                  | `Optimizer.__init__`                     |                                    |
|                  | `GradScaler.scale`, `GradScaler.step`    | `train/amp_scale`, `…/amp_skipped` |
| `dataloader.py`  | `__next__` of the DataLoader's iterators | data wait, samples/s, epoch        |
| `copies.py`      | `to`, `cuda` of tensors (only CUDA)      | `perf/h2d`                         |
| `settings.py`    | only with settings: construction of      | none                               |
|                  | loaders and optimizers, `zero_grad`, …   |                                    |

`state.py` has the shared state, and the steps of scripts without an optimizer. `step_timing.py`
measures the time of a step, `epochs.py` counts batches and epochs, `attribution.py` finds the
optimizer of a loss.

No wrapper waits for a GPU or changes a result, except those of settings. A wrapper that fails is
logged once and disabled. Wrappers work in the thread that steps the optimizers, not in forked
children and DataLoader workers. docs/watch.md lists the limits.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stepscope.common.secrets import is_secret
from stepscope.distributed.ddp_timing import DDP_METRICS
from stepscope.host.environment import warn_if_unsupported
from stepscope.session.script_session import ScriptSession
from stepscope.watch.hooks import dataloader, loss, optimizer
from stepscope.watch.hooks.patching import Function, HookGuard, PostImportHook, replace_call
from stepscope.watch.hooks.settings import SettingHooks
from stepscope.watch.hooks.state import TRIAL_BACKWARDS, HookState

log = logging.getLogger(__name__)

CHILDREN_S = 0.5  # Minimum CPU time of child processes that may have been spent on training.
MAX_ARGUMENTS = 256
MAX_TEXT = 200  # characters of an argument

Attach = Callable[[ModuleType, HookState], None]


# The metrics that are missing if a hook cannot be attached, and the hook.
CAPTURES: tuple[tuple[str, Attach], ...] = (
    ("all training metrics", optimizer.attach),
    ("train/loss", loss.attach),
    ("train/grad_norm", optimizer.attach_grad_norm),
    ("train/amp_scale and train/amp_skipped", loss.attach_grad_scaler),
    ("perf/data_wait, perf/samples_per_sec and train/epoch", dataloader.attach),
    (DDP_METRICS, optimizer.attach_phases),
    ("the versions of torch", lambda torch, state: state.session.describe_torch()),
    ("details of failed allocations", lambda torch, state: state.session.oom.attach()),
)


class TorchHooks:
    """The hooks of one run, installed when torch is imported."""

    def __init__(self, session: ScriptSession, applied: SettingHooks | None) -> None:
        self._state = HookState(session, applied)
        session.oom.earlier = self._state.attribution.earlier_bytes
        self.applied = applied
        self._import = PostImportHook("torch", self._attach)
        self._has_torch = False
        record_arguments(self._state)
        self._import.start()

    def end(self) -> str | None:
        """Return the reason if the script has ended without a step, else None."""
        state = self._state
        if state.recorder.step or state.amp_skipped:
            return None
        return no_steps_reason(state, has_torch=self._has_torch)

    def leave(self) -> None:
        """Detach after a fork, in the child."""
        self._import.stop()
        self._state.close()
        if self.applied is not None:
            self.applied.is_active = False

    def _attach(self, torch: ModuleType) -> None:
        self._has_torch = True
        warn_if_unsupported(str(getattr(torch, "__version__", "")))
        for metrics, attach in CAPTURES:
            try:
                attach(torch, self._state)
            except Exception as error:  # noqa: BLE001 - another torch must not break the script
                text = "stepscope: %s will be missing, torch %s is not supported (%s)"
                log.warning(text, metrics, getattr(torch, "__version__", "?"), error)
        if self.applied is not None:
            self.applied.attach(torch)


def record_arguments(state: HookState) -> None:
    """Record what the script parses with argparse as its config, without secrets."""
    guard = HookGuard("config of the script's arguments")

    def record(namespace: Any) -> None:
        found = {name: _recordable(name, value) for name, value in vars(namespace).items()}
        values = {name: value for name, value in found.items() if value is not None}
        config = dict(state.recorder.run_json["config"]) | values
        state.recorder.describe(config=dict(list(config.items())[:MAX_ARGUMENTS]))

    def parse(original: Function, self: Any, args: Any = None, namespace: Any = None) -> Any:
        found = original(self, args, namespace)
        # Other lists are those of subparsers, or of libraries.
        if args is None or args == sys.argv[1:]:
            guard.call(record, found[0])
        return found

    replace_call(argparse.ArgumentParser, "parse_known_args", parse)


def _recordable(name: str, value: Any) -> bool | float | str | None:
    """Return a number or short text; None for other values and for a secret."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, bool | int | float | str) or len(str(value)) > MAX_TEXT:
        return None
    return None if is_secret(name, value) else value


def no_steps_reason(state: HookState, *, has_torch: bool) -> str:
    """Return the reason why a script has ended without a recorded step."""
    if not has_torch:
        reason = "the script did not import torch"
    elif state.attribution.made:
        reason = "the script made an optimizer of torch, but its training thread never stepped one"
    elif state.manual_steps.backwards:
        reason = (
            "the script made no optimizer of torch, and without one the first "
            f"{TRIAL_BACKWARDS} calls of backward() are no steps"
        )
    else:
        reason = "the script never called backward() in its training thread"
    text = f"No training step was seen: {reason}."
    # CPU time of children that the script has waited for; the recorder starts none.
    if resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > CHILDREN_S:
        text += " Training in the processes that it started is not recorded (docs/watch.md)."
    return text


def install(session: ScriptSession, applied: SettingHooks | None = None) -> TorchHooks:
    """Record the training of the script, and apply settings, from its import of torch on."""
    hooks = TorchHooks(session, applied)
    _installed.append(hooks)
    return hooks


_installed: list[TorchHooks] = []


def _leave_all() -> None:
    while _installed:
        _installed.pop().leave()


os.register_at_fork(after_in_child=_leave_all)
