"""One optimizer step: forward, backward, unscale, clip, update, without reading a value back."""

from __future__ import annotations

import logging
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
from trainer.training.fsdp import casts_weights, whole
from trainer.training.model import AS_LOADED, InputFormat
from trainer.training.precision import autocast
from trainer.training.state import TrainState
from trainer.workloads.task import LossFunction, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """What a step needs; call it with each of its batches on the device."""

    model: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager[object]
    max_grad_norm: float
    form: InputFormat = AS_LOADED
    set_to_none: bool = True
    wrapped: Callable[[Tensor], Tensor] | None = None
    """The model in DistributedDataParallel, torch.compile or both, for training; validation runs it
    as it is written."""
    apart: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of the batches of a step before its last, in which ranks do not average gradients."""

    phases: TrainPhaseTimer | None = None
    """Takes the times of the parts; None in a process that trains alone."""

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Train on a batch; return its part of the loss and, with clipping, the gradient norm.

        A step may take several batches, whose parts of the loss add up to the mean over all of
        the step's samples: `of` says how many these are (0: this batch has them all). Gradients
        add up too, until the `last` batch updates the weights; the norm (0-d) comes with it.
        """
        began_s = time.perf_counter()
        with nullcontext() if last else self.apart():
            loss = self.forward(inputs, targets, of)
            forwarded_s = time.perf_counter()
            self.backward(loss)
        ended_s = time.perf_counter()
        norm = self.update() if last else None
        if self.phases is not None:
            self.phases.add(began_s, forwarded_s, ended_s)
        return loss.detach(), norm

    def forward(self, inputs: Tensor, targets: Tensor, of: int = 0) -> Tensor:
        """Return the mean loss of a batch (0-d), or its part of the mean over `of` samples."""
        with span(FORWARD):
            # Not `or`: what torch compiles may have a length, which then counts as its truth.
            model = self.model if self.wrapped is None else self.wrapped
            loss = self._outputs_and_loss(model, inputs, targets)[1]
            return loss * (len(targets) / of) if of > len(targets) else loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those that are there."""
        with span(BACKWARD):
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, factor: float = 1.0) -> Tensor | None:
        """Update the weights, then drop the gradients; return their norm (0-d) with clipping.

        With `set_to_none` only weights and optimizer state stay allocated between steps. `factor`
        multiplies the gradients before: planned samples of the step by those that there were.
        """
        with span(OPTIMIZER):
            norm = self.apply(factor)
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return norm

    def apply(self, factor: float = 1.0) -> Tensor | None:
        """Update the weights as `update` does, and leave the gradients."""
        if factor != 1:
            for weights in self.model.parameters():
                if weights.grad is not None:
                    weights.grad.mul_(factor)
        norm = self._clip() if self.max_grad_norm > 0 else None
        # fp16: a step with infinite gradients is skipped. Without a fused optimizer the scaler
        # waits for the device here to know.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def evaluate(
        self, inputs: Tensor, targets: Tensor, counted: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the model as it is written, and their mean loss (0-d).

        The mean is that of the first `counted` samples, by default of all.
        """
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
                outputs = outputs.float()  # a loss of 16 bits would round sums over the batch
            return outputs, self.loss(outputs[:counted], targets[:counted])

    def _clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)  # the limit is meant for the true gradients
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))


def build_train_step(training: TrainState, task: Task) -> TrainStep:
    """Return the step as the configuration wants it, with the model as it is written."""
    config = training.config
    return TrainStep(
        model=training.model,
        loss=task.loss,
        optimizer=training.optimizer,
        scaler=training.scaler,
        autocast=(
            nullcontext()
            if casts_weights(training.model, config)
            else autocast(config.precision, training.compute.device)
        ),
        max_grad_norm=config.max_grad_norm,
        form=InputFormat.of(config),
        set_to_none=config.set_to_none,
    )


class TrainPhaseTimer:
    """Adds up the times of forward, backward and optimizer over a step's batches.

    Only in a job of several processes, to find slow ranks (docs/distributed.md).
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` is what training runs, in DistributedDataParallel or not."""
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        self._ddp: DdpTiming | None = None
        if isinstance(model, DistributedDataParallel):
            self._ddp = DdpTiming()
            self._ddp.meet(model)

    def add(self, began_s: float, forwarded_s: float, ended_s: float) -> None:
        """Add a batch by its times on the host's clock; its update ends now."""
        self._forward_s += forwarded_s - began_s
        self._backward_s += ended_s - forwarded_s
        self._optimizer_s += time.perf_counter() - ended_s

    def take(self) -> MetricRow:
        """Return the times of the step that ends now, in seconds by metric."""
        row: MetricRow = {
            "perf/forward": self._forward_s,
            "perf/backward": self._backward_s,
            "perf/optimizer": self._optimizer_s,
        }
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        if self._ddp is not None:
            try:
                self._ddp.add(row, time.perf_counter())
            except Exception as error:  # noqa: BLE001 - another torch; the training must go on
                log.warning("%s will be missing from here on (%s)", DDP_METRICS, error)
                self._ddp = None
        return row
