"""fp16 mixed precision: the unscaled loss, the scale, and the steps that GradScaler skips.

A skipped step is no optimizer step: it does not move the step counter, but it leaves a row that
counts it, and the page's commands act there too (a diverged model skips for ever).
"""

from __future__ import annotations

from threading import get_ident
from types import ModuleType
from typing import Any

from stepscope.watch.hooks.loss import UNSCALED
from stepscope.watch.hooks.patching import Function, Guard, Patches, opaque
from stepscope.watch.hooks.state import State


class Scaling:
    """Listens to `GradScaler.scale` and `GradScaler.step`; torch.cuda.amp's is a subclass."""

    def __init__(self, torch: ModuleType, state: State) -> None:
        self._state = state
        self._tensor: type[Any] = torch.Tensor
        self._optimizer: type[Any] = torch.optim.Optimizer
        self._scaler: type[Any] = torch.amp.GradScaler
        self._is_compiling = torch.compiler.is_compiling
        for function in (self._remember, self._before, self._skipped):
            opaque(function, with_callees=True)

    def around_scale(self, original: Function) -> Function:
        """Keep the loss on what was made of it."""
        is_compiling, guard = self._is_compiling, Guard("train/loss")

        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaled is not outputs and not is_compiling():
                guard.call(self._remember, outputs, scaled)
            return scaled

        return scale

    def around_step(self, original: Function) -> Function:
        """See the scale that the step uses, and whether there was a step."""
        state, guard = self._state, Guard("train/amp_scale and train/amp_skipped")

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
                    state.idle_s += state.session.boundary()
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
            # FSDP's scales by code of its own: what we have is not the loss.
            state.take_loss(optimizer)
        state.amp_scale, state.uses_amp = scaler._scale, True

    def _skipped(self, optimizer: Any) -> None:
        state = self._state
        state.amp_skipped += 1
        state.take_loss(optimizer)
        state.clips.take(optimizer, state.parties)
        row = {"train/amp_scale": state.amp_scale, "train/amp_skipped": float(state.amp_skipped)}
        state.recorder.log(state.step, row)
        if str(state.amp_skipped).strip("0") == "1":  # 1, 10, 100, …: not an event every step
            state.recorder.event(
                "amp_skipped",
                "GradScaler skipped an optimizer step because a gradient was inf or NaN "
                f"({state.amp_skipped} so far)",
                skipped=state.amp_skipped,
            )


def attach_grad_scaler(torch: ModuleType, state: State, patches: Patches) -> None:
    """Wrap torch.amp.GradScaler."""
    scaling = Scaling(torch, state)
    patches.replace(torch.amp.GradScaler, "scale", scaling.around_scale, traced=True)
    patches.replace(torch.amp.GradScaler, "step", scaling.around_step, traced=False)
