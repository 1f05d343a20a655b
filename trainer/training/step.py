"""An optimizer step: forward, backward, unscale, clip, update, without a device synchronization."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.profiling.phase_ranges import BACKWARD, FORWARD, OPTIMIZER, span
from stepscope.recorder.cuda_readback import MetricRow
from stepscope.watch.hooks.patching import HookGuard
from trainer.training.fsdp import casts_weights, whole
from trainer.training.model import AS_LOADED, InputFormat, ParallelModel
from trainer.training.precision import autocast
from trainer.training.state import TrainState
from trainer.workloads.task import LossFunction, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """An optimizer step; call it with each of its micro-batches on the device."""

    model: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager[object]
    max_grad_norm: float
    form: InputFormat = AS_LOADED
    set_to_none: bool = True
    wrapped: Callable[[Tensor], Tensor] | None = None
    """The model with DDP or torch.compile, for training; validation runs `model`."""
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of all micro-batches but the last: ranks do not average gradients."""
    phases: TrainPhaseTimer | None = None  # only with several ranks

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Train on a micro-batch; return its share of the loss and, with clipping, the norm.

        `of` is the number of samples of the optimizer step (0: those of this batch). The shares of
        the micro-batches add up to the mean loss over them, and so do the gradients. The `last`
        micro-batch updates the weights and returns the gradient norm (0-d).
        """
        began_s = time.perf_counter()
        with nullcontext() if last else self.no_sync():
            loss = self.forward(inputs, targets, of)
            forwarded_s = time.perf_counter()
            self.backward(loss)
        ended_s = time.perf_counter()
        norm = self.update() if last else None
        if self.phases is not None:
            self.phases.add(began_s, forwarded_s, ended_s)
        return loss.detach(), norm

    def forward(self, inputs: Tensor, targets: Tensor, of: int = 0) -> Tensor:
        """Return the mean loss of a batch (0-d), or its share of the mean over `of` samples."""
        with span(FORWARD):
            # Not `or`: a compiled model may have a length and thereby be falsy.
            model = self.model if self.wrapped is None else self.wrapped
            loss = self._outputs_and_loss(model, inputs, targets)[1]
            return loss * (len(targets) / of) if of > len(targets) else loss

    def backward(self, loss: Tensor) -> None:
        with span(BACKWARD):
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> Tensor | None:
        """Update the weights and zero the gradients; return their norm (0-d) with clipping."""
        with span(OPTIMIZER):
            norm = self.apply()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return norm

    def apply(self) -> Tensor | None:
        """Update the weights as `update` does, but keep the gradients."""
        norm = self._clip() if self.max_grad_norm > 0 else None
        # fp16: skips a step with infinite gradients; only a fused optimizer needs no sync for that.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def evaluate(
        self, inputs: Tensor, targets: Tensor, counted: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of `model` and the mean loss (0-d) of the first `counted` samples."""
        return self._outputs_and_loss(self.model, inputs, targets, counted)

    def _outputs_and_loss(
        self,
        model: Callable[[Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
        counted: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        with self.autocast:
            outputs = model(self.form(inputs))
            if self.form.dtype is not None:
                outputs = outputs.float()  # a 16-bit loss would round sums over the batch
            return outputs, self.loss(outputs[:counted], targets[:counted])

    def _clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)  # the limit applies to unscaled gradients
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))


def build_train_step(
    training: TrainState,
    task: Task,
    parallel: ParallelModel | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    phases: TrainPhaseTimer | None = None,
) -> TrainStep:
    """Return the optimizer step of a configuration; `forward` is the compiled model."""
    config = training.config
    parallel = parallel or ParallelModel(training.model)
    casts = casts_weights(training.model, config)
    return TrainStep(
        model=training.model,
        loss=task.loss,
        optimizer=training.optimizer,
        scaler=training.scaler,
        autocast=nullcontext() if casts else autocast(config.precision, training.compute.device),
        max_grad_norm=config.max_grad_norm,
        form=InputFormat.of(config),
        set_to_none=config.set_to_none,
        wrapped=parallel.model if forward is None else forward,
        no_sync=parallel.no_sync,
        phases=phases,
    )


class TrainPhaseTimer:
    """Sums forward, backward and optimizer times of a step's micro-batches, to find stragglers."""

    def __init__(self, model: nn.Module) -> None:
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        self._ddp, self._guard = DdpTiming(), HookGuard(DDP_METRICS)
        if isinstance(model, DistributedDataParallel):
            self._ddp.attach(model)

    def add(self, began_s: float, forwarded_s: float, ended_s: float) -> None:
        """Add a micro-batch by its host times in seconds; its update ends now."""
        self._forward_s += forwarded_s - began_s
        self._backward_s += ended_s - forwarded_s
        self._optimizer_s += time.perf_counter() - ended_s

    def take(self) -> MetricRow:
        """Return the times of the step in seconds by metric key, and reset them."""
        row: MetricRow = {
            "perf/forward": self._forward_s,
            "perf/backward": self._backward_s,
            "perf/optimizer": self._optimizer_s,
        }
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        self._guard.call(self._ddp.add, row, time.perf_counter())
        return row
