"""Record the loss: the sum of all scalars with a `backward()` call before the optimizer step.

The step uses the gradient of that sum. `zero_grad()` resets the sum, so the closures of LBFGS and
the two passes of SAM count once. Several optimizers have separate sums (`attribution.py`).
"""

from __future__ import annotations

import time
from math import isfinite
from threading import get_ident
from types import ModuleType
from typing import Any

from stepscope.profiling.phase_ranges import BACKWARD, OPTIMIZER, span
from stepscope.watch.hooks.attribution import GradSnapshot, members, reading
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace, replace_call
from stepscope.watch.hooks.state import HookState

UNSCALED = "_stepscope_unscaled"
"""Attribute of a loss that a GradScaler has scaled: the unscaled loss, detached."""


class LossHook:
    """Sums the losses of `backward()`."""

    def __init__(self, torch: ModuleType, state: HookState) -> None:
        self._state = state
        self._guard = HookGuard("train/loss")
        self._tensor: type[Any] = torch.Tensor
        self._is_compiling = torch.compiler.is_compiling
        self._disabled = torch._C._disabled_torch_dispatch_impl
        opaque(self._add, with_callees=True)
        if state.applied is not None:
            opaque(state.applied.before_backward, with_callees=True)

    def around_backward(self, original: Function) -> Function:
        """Wrap `torch.autograd.backward`, which `Tensor.backward` also calls."""
        state = self._state
        times = state.times
        attribution = state.attribution
        manual_steps = state.manual_steps
        applied = state.applied
        readings = state.session.readings
        learning = state.learning
        training = state.training
        guard = self._guard
        add = self._add
        clock = time.perf_counter

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if applied is not None:
                applied.before_backward(tensors)
            # A nested call is reentrant checkpointing.
            if state.in_backward or (get_ident() != state.thread and not state.claim()):
                return original(tensors, grad_tensors, *args, **kwargs)
            if readings.wanted:
                readings.read_if_requested()
            before = guard.call(attribution.gradients) if attribution.has_separate else None
            if state.loss is not None:
                guard.call(state.drop_cleared_loss)
            if learning.holds_gradients:
                guard.call(learning.before_backward)
            training.phase = BACKWARD
            began_s = clock()
            state.in_backward = True
            try:
                with span(BACKWARD):
                    result = original(tensors, grad_tensors, *args, **kwargs)
            finally:
                state.in_backward = False
            times.backwards += 1
            if readings.wanted:
                readings.read_if_requested()
            times.phases.backward(began_s, clock())
            training.phase = OPTIMIZER
            guard.call(add, tensors, grad_tensors, before)
            if not attribution.made:
                guard.call(manual_steps.after_backward, tensors)
                if manual_steps.is_certain:
                    times.idle_s += state.session.boundary()
            return result

        return backward

    def around_zero_grad(self, original: Function) -> Function:
        state = self._state
        guard = self._guard

        def zero_grad(optimizer: Any, set_to_none: bool = True) -> Any:
            if not state.attribution.made:  # one that was copied, or made before the hooks
                guard.call(state.register, optimizer)
            if get_ident() == state.thread:
                if state.loss is not None:
                    guard.call(state.times.feed.drop_left_over)
                if state.attribution.sums:
                    guard.call(state.drop_loss, optimizer)
                else:
                    state.loss = None
            return original(optimizer, set_to_none)

        return zero_grad

    def around_module_zero_grad(self, original: Function) -> Function:
        state = self._state
        guard = self._guard
        is_compiling = self._is_compiling

        def zero_grad(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            has_loss = state.loss is not None or state.attribution.sums
            if has_loss and get_ident() == state.thread:
                guard.call(self._clear, module)
            return original(module, *args, **kwargs)

        return zero_grad

    def _clear(self, module: Any) -> None:
        """Discard the losses of the optimizers whose parameters are all in the module."""
        cleared = set(map(id, module.parameters()))
        for optimizer in list(self._state.attribution.alive.values()):
            if cleared.issuperset(members(optimizer)):
                self._state.drop_loss(optimizer)

    def make_optimizer(
        self, original: Function, optimizer: Any, /, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._guard.call(self._state.register, optimizer)

    def _add(self, tensors: Any, factor: Any, before: GradSnapshot | None) -> None:
        state = self._state
        is_plain = type(tensors) is self._tensor and factor is before is None
        if is_plain and tensors.is_cpu and not state.uses_amp:
            # The common case; without a factor it is a scalar.
            value = tensors.item()
            state.add_loss(value)
            if not isfinite(value):
                state.learning.loss_not_finite(state.step + 1)
            return
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensors = tensors[0]
        if not self._is_plain(tensors) or tensors.numel() != 1:
            return
        unscaled = getattr(tensors, UNSCALED, None) if state.uses_amp else None
        value = reading(tensors if unscaled is None else unscaled)
        if value is None:
            return
        if isinstance(factor, (list, tuple)) and len(factor) == 1:
            factor = factor[0]
        if type(value) is float:
            if not isfinite(value):
                state.learning.loss_not_finite(state.step + 1)
        else:
            value = value.clone()  # the next replay of a CUDA graph overwrites the loss
        if factor is not None:  # such as the -1 of a Wasserstein GAN
            value = value * reading(factor)
        if before is not None:
            state.attribution.add(before, value)
        else:
            state.add_loss(value)

    def _is_plain(self, tensor: Any) -> bool:
        """Return True for a tensor with local data, unlike a DTensor or a fake tensor."""
        if type(tensor) is self._tensor:
            return True
        if not isinstance(tensor, self._tensor):
            return False
        return getattr(type(tensor), "__torch_dispatch__", None) is self._disabled


def attach(torch: ModuleType, state: HookState) -> None:
    losses = LossHook(torch, state)
    replace(torch.autograd, "backward", losses.around_backward, traced=False)
    replace(torch.optim.Optimizer, "zero_grad", losses.around_zero_grad, traced=False)
    replace(torch.nn.Module, "zero_grad", losses.around_module_zero_grad, traced=True)
    replace_call(torch.optim.Optimizer, "__init__", losses.make_optimizer)


class GradScalerHook:
    """Wraps `GradScaler.scale` and `GradScaler.step`, also of the subclass in torch.cuda.amp."""

    def __init__(self, torch: ModuleType, state: HookState) -> None:
        self._state = state
        self._tensor: type[Any] = torch.Tensor
        self._optimizer: type[Any] = torch.optim.Optimizer
        self._scaler: type[Any] = torch.amp.GradScaler
        self._is_compiling = torch.compiler.is_compiling
        for function in (self._remember, self._before, self._skipped):
            opaque(function, with_callees=True)

    def around_scale(self, original: Function) -> Function:
        """Attach the unscaled loss to the scaled loss."""
        is_compiling, guard = self._is_compiling, HookGuard("train/loss")

        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaled is not outputs and not is_compiling():
                guard.call(self._remember, outputs, scaled)
            return scaled

        return scale

    def around_step(self, original: Function) -> Function:
        """Record the scale that the step uses, and skipped steps."""
        state, guard = self._state, HookGuard("train/amp_scale and train/amp_skipped")

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            is_ours = get_ident() == state.thread and isinstance(optimizer, self._optimizer)
            if not is_ours or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            guard.call(self._before, scaler, optimizer)
            stepped = state.stepped
            try:
                result = original(scaler, optimizer, *args, **kwargs)
                if state.stepped == stepped:
                    guard.call(self._skipped, optimizer)
                    state.times.idle_s += state.session.boundary()
            finally:
                state.amp_scale = None
            return result

        return step

    def _remember(self, outputs: Any, scaled: Any) -> None:
        if isinstance(scaled, self._tensor):
            setattr(scaled, UNSCALED, outputs.detach())
            self._state.uses_amp = True
        elif isinstance(scaled, (list, tuple)):
            for output, result in zip(outputs, scaled, strict=True):
                self._remember(output, result)

    def _before(self, scaler: Any, optimizer: Any) -> None:
        state = self._state
        if type(scaler).scale is not self._scaler.scale:
            # FSDP's subclass overrides `scale`, so the sum is of scaled losses.
            state.take_loss(optimizer)
        state.amp_scale = scaler._scale
        state.uses_amp = True

    def _skipped(self, optimizer: Any) -> None:
        state = self._state
        state.amp_skipped += 1
        state.take_loss(optimizer)
        state.clips.take(optimizer, state.attribution)
        row = {"train/amp_scale": state.amp_scale, "train/amp_skipped": float(state.amp_skipped)}
        state.recorder.log(state.step, row)
        if str(state.amp_skipped).strip("0") == "1":  # 1, 10, 100, …: not an event every step
            state.recorder.event(
                "amp_skipped",
                "GradScaler skipped an optimizer step because a gradient was inf or NaN "
                f"({state.amp_skipped} so far)",
                skipped=state.amp_skipped,
            )


def attach_grad_scaler(torch: ModuleType, state: HookState) -> None:
    scaling = GradScalerHook(torch, state)
    replace(torch.amp.GradScaler, "scale", scaling.around_scale, traced=True)
    replace(torch.amp.GradScaler, "step", scaling.around_step, traced=False)
