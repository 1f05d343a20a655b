"""One optimizer step: forward, backward, unscale, clip, update, without reading a value back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.workloads.task import LossFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """What a step needs; call it with a batch on the device."""

    model: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager[object]
    clip_norm: float

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Train on a batch; return the loss and, while clipping is on, the gradient norm (0-d).

        Gradients are freed at the end, so that between steps only weights and optimizer state
        stay allocated.
        """
        with self.autocast:
            loss = self.loss(self.model(inputs), targets)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        norm = self._clip() if self.clip_norm > 0 else None
        # fp16: a step with infinite gradients is skipped. Without a fused optimizer the scaler
        # waits for the device here to know.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    def _clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)  # the limit is meant for the true gradients
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
