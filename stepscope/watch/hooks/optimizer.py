"""Record a row for every `optimizer.step()`: the values and times since the last step."""

from __future__ import annotations

import sys
import time
import weakref
from importlib import import_module
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any

from stepscope.session.code_sampler import OWN_CODE
from stepscope.watch.hooks.attribution import reading
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace, replace_call
from stepscope.watch.hooks.state import HookState

MAX_OPTIMIZERS = 8
"""Maximum number of recorded optimizers; one per parameter would make thousands of keys."""
MAX_GROUPS = 8  # Maximum number of parameter groups whose learning rate is recorded.


class OptimizerRecord:
    """Index (in the order of first steps), latest step and metric keys of one optimizer.

    Optimizer i > 0 has keys with the suffix `.optimizer<i>`, the learning rate of parameter group
    j > 0 a key with the suffix `.group<j>`.
    """

    def __init__(self, optimizer: Any, index: int, step: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.step = step
        suffix = f".optimizer{index}" if index else ""
        self.loss = f"train/loss{suffix}"
        self.backwards = f"train/backwards{suffix}"
        self.grad_norm = f"train/grad_norm{suffix}"
        more = (f"train/lr{suffix}.group{j}" for j in range(1, MAX_GROUPS))
        self.learning_rates = (f"train/lr{suffix}", *more)


UNKNOWN = OptimizerRecord.__new__(OptimizerRecord)
"""Placeholder for an optimizer that has not stepped before."""


class OptimizerStepHook:
    """Post hook of all optimizers' `step`."""

    def __init__(self, torch: ModuleType, state: HookState) -> None:
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self._state = state
        self._guard = HookGuard("all training metrics")
        self._learning_guard = HookGuard("findings about gradients")
        self._tracks: dict[int, OptimizerRecord | None] = {}
        """By the `id` of a live optimizer; None for an optimizer that is not recorded."""
        self._slots: list[OptimizerRecord] = []
        self._boundary = state.session.boundary
        self._log = state.recorder.log

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record a row, then execute commands. Raises only for a Stop."""
        state = self._state
        if get_ident() != state.thread and not state.claim(by_step=True):
            return
        if state.on_cuda and self._is_capturing():
            return  # captured, not executed; and a query of events would break the capture
        state.stepped += 1
        state.attribution.stepped(optimizer)
        now_s = time.perf_counter()
        self._guard.call(self._record, optimizer, now_s)
        if now_s >= state.learning.due_s or state.learning.holds_gradients:
            self._learning_guard.call(state.learning.after_step, optimizer, now_s)
        state.training.phase = OWN_CODE if state.times.feed.is_read else ""
        idle_s = self._boundary()
        if idle_s:
            state.times.idle_s += idle_s
            state.times.phases.mark_s = time.perf_counter()

    def _record(self, optimizer: Any, now_s: float) -> None:
        state = self._state
        track = self._tracks.get(id(optimizer), UNKNOWN)
        if track is UNKNOWN:
            track = self._register(optimizer)
        if track is None:
            return
        row: dict[str, Any] = {}
        if track.step == state.step:  # else this optimizer has its turn of the step
            state.step += 1
            state.session.optimizer_steps = state.step
            state.times.add(row, now_s)
        track.step = state.step
        if state.times.feed.epoch is not None:
            row["train/epoch"] = float(state.times.feed.epoch)
        loss, terms = state.take_loss(optimizer)
        if loss is not None:
            row[track.loss] = loss
            if terms > 1:
                row[track.backwards] = float(terms)
        for key, group in zip(track.learning_rates, optimizer.param_groups, strict=False):
            row[key] = group.get("lr")
        if state.clips.calls:
            norm = state.clips.take(optimizer, state.attribution)
            if norm is not None:
                row[track.grad_norm] = norm
        if state.uses_amp:
            row["train/amp_scale"] = state.amp_scale
            row["train/amp_skipped"] = float(state.amp_skipped)
        self._log(state.step, row)

    def _register(self, optimizer: Any) -> OptimizerRecord | None:
        """Assign the first free index to a new optimizer."""
        self._state.register(optimizer)
        self._state.session.parts.add_optimizer(optimizer)
        if _steps_inside_another(optimizer):
            return self._remember(optimizer, None)
        # It may replace a deleted optimizer, as in k-fold training.
        places = [i for i, track in enumerate(self._slots) if track.optimizer() is None]
        index = places[0] if places else len(self._slots)
        if index >= MAX_OPTIMIZERS:
            return self._remember(optimizer, None)
        # A replacement begins a step. The first step of the second optimizer of a pair, as in a
        # GAN, is the current step of the first.
        step = self._state.step - (0 if places or not self._slots else 1)
        track = OptimizerRecord(optimizer, index, step)
        if not self._slots:
            devices = [p.device for group in optimizer.param_groups for p in group["params"]]
            self._state.train_on(devices[0] if devices else None)
            session = self._state.session
            if session.world_size > 1 and len(set(devices)) == 1:
                session.oom.trains_on = devices[0].index
        self._slots[index : index + 1] = [track]
        self._state.recorder.describe(optimizers=[track.name for track in self._slots])
        return self._remember(optimizer, track)

    def _remember(self, optimizer: Any, track: OptimizerRecord | None) -> OptimizerRecord | None:
        self._tracks[id(optimizer)] = track
        weakref.finalize(optimizer, self._tracks.pop, id(optimizer), None).atexit = False
        return track


def attach(torch: ModuleType, state: HookState) -> None:
    steps = OptimizerStepHook(torch, state)
    # A frame that torch.compile traces calls the unmodified hook, between two graphs.
    OptimizerStepHook.after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    opaque(steps.after_step, with_callees=True)
    import_module("torch.optim.optimizer").register_optimizer_step_post_hook(steps.after_step)


class ClipGradHook:
    """Remembers the norms that `clip_grad_norm_` returns, for the step."""

    def __init__(self, torch: ModuleType, state: HookState) -> None:
        self._state = state
        self._tensor: type[Any] = torch.Tensor
        self._is_compiling = torch.compiler.is_compiling
        opaque(self._add, with_callees=True)
        opaque(self._listed, with_callees=True)

    def around(self, original: Function) -> Function:
        state, is_compiling, guard = self._state, self._is_compiling, HookGuard("train/grad_norm")

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != state.thread or not guard.works:
                return original(parameters, *args, **kwargs)
            listed = self._listed(parameters)
            # A generator can be read only once; torch warns of an empty list.
            norm = original(listed or parameters, *args, **kwargs)
            if listed:
                guard.call(self._add, norm, listed)
            return norm

        return clip_grad_norm_

    def _listed(self, parameters: Any) -> list[Any]:
        return [parameters] if isinstance(parameters, self._tensor) else list(parameters)

    def _add(self, norm: Any, parameters: list[Any]) -> None:
        # A DTensor would need a gather from all ranks.
        value = reading(norm) if type(norm) is self._tensor else None
        self._state.clips.add(value, parameters)


def attach_grad_norm(torch: ModuleType, state: HookState) -> None:
    """Wrap `clip_grad_norm_` in both modules from which scripts import it."""
    clipping = ClipGradHook(torch, state)
    name = "clip_grad_norm_"
    module = import_module("torch.nn.utils.clip_grad")
    replace(module, name, clipping.around, traced=True)
    package = import_module("torch.nn.utils")
    replace(package, name, lambda _: getattr(module, name), traced=True)


def attach_phases(torch: ModuleType, state: HookState) -> None:
    """Read the times of DistributedDataParallel, in a distributed job only."""
    if state.session.world_size > 1:
        phases = state.times.phases
        replace_call(torch.nn.parallel.DistributedDataParallel, "__init__", phases.make_ddp)


def _steps_inside_another(optimizer: Any) -> bool:
    """Return True if the `step` of a wrapping optimizer calls the `step` of this one."""
    frame: FrameType | None = sys._getframe(1)
    wrapper = None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "wrapper" and module == "torch.optim.optimizer":
            if wrapper is not None and frame.f_locals.get("self") is not optimizer:
                return True
            wrapper = frame
        frame = frame.f_back
    return False
