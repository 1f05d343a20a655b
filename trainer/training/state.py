"""Training state in a checkpoint: model, optimizer, scaler, RNG and position.

Rank 0 writes it, with FSDP as full tensors: any strategy and number of ranks can resume it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.config import (
    LRSchedule,
    Optimizer,
    OptimizerImpl,
    Precision,
    RunConfig,
    reads,
)
from trainer.training.accelerator import Accelerator
from trainer.training.checkpoint import MODEL, OPTIMIZER, CheckpointError, write_checkpoint
from trainer.training.precision import grad_scaler
from trainer.training.rank_info import ALONE, TrainerRank

MOMENTUM = 0.9
SAME = (
    *("workload", "width", "num_layers", "context_length"),
    *("dataset", "optimizer", "lr_scheduler"),
)
"""Settings that must equal those of the checkpoint if the workload reads them."""


class TrainState:
    """The state that changes while training; `load` restores the result of `state_dict`.

    `epoch` counts from 1 and has `samples` samples over all ranks, of which `offset` are done.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        compute: Accelerator,
        ranks: TrainerRank = ALONE,
        samples: int = 1,
    ) -> None:
        self.config = config
        self.compute = compute
        self.ranks = ranks
        self.model = model
        self.optimizer = _optimizer(config, model)
        self._begin_momentum()
        self.scaler = grad_scaler(config.precision, compute.device)
        self.samples = samples
        self._go_to(0, 1, 0)
        self.best_loss = math.inf
        self._generator = torch.Generator().manual_seed(config.seed)
        self._epoch_state = self._generator.get_state()

    def order(self, samples: int) -> Tensor:
        """Draw the epoch's order, equal on all ranks; return this rank's rest (int64, 1-d)."""
        self._epoch_state = self._generator.get_state()
        return self.ranks.share(torch.randperm(samples, generator=self._generator), self.offset)

    def count(self, steps: int, samples: int) -> None:
        """Advance the position by steps and samples, and set the next learning rate."""
        self.step += steps
        self.offset += samples
        self._set_learning_rate()

    def next_epoch(self) -> None:
        self._epoch_state = self._generator.get_state()
        self.epoch += 1
        self.offset = 0

    @property
    def has_ended(self) -> bool:
        """Whether the last epoch or the last step is done."""
        limit = self.config.max_steps
        return self.epoch > self.config.epochs or 0 < limit <= self.step

    def end_here(self) -> None:
        """Let the training end with this step, and the validation after it."""
        self.config = replace(self.config, max_steps=self.step)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples / self.config.step_size)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values to resume from, bit for bit on a CPU.

        All ranks must call this; only rank 0 gets the tensors of model and optimizer.
        """
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        device = self.compute.device
        return {
            "config": self.config.to_dict(),
            MODEL: get_model_state_dict(self.model, options=full),
            OPTIMIZER: get_optimizer_state_dict(self.model, self.optimizer, options=full),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            # At the start of the epoch: `load` draws its order again and skips `offset` samples.
            "order_rng": self._epoch_state,
            "position": {"step": self.step, "epoch": self.epoch, "offset": self.offset},
            "best_loss": self.best_loss,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint. Raises CheckpointError if it does not fit the run."""
        for name in SAME:
            ours = getattr(self.config, name)
            theirs = state["config"].get(name, ours)
            if theirs != ours and reads(self.config.workload, name):
                raise CheckpointError(
                    f"resume_from: the checkpoint was made with {name} {theirs}, got {ours}. "
                    f"Set {name} to {theirs}."
                )
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            detail = str(error).splitlines()[0]
            raise CheckpointError(
                f"resume_from: the checkpoint does not fit this run ({detail}). Choose another one."
            ) from error
        if self.has_ended:
            ended = self.epoch > self.config.epochs
            field, done = ("epochs", self.epoch - 1) if ended else ("max_steps", self.step)
            unit = "epochs" if ended else "steps"
            raise CheckpointError(
                f"{field}: the checkpoint already has {done} {unit}, got "
                f"{getattr(self.config, field)}. Increase {field}; it counts from the first run's "
                "start."
            )

    def _load(self, state: dict[str, Any]) -> None:
        # Rank 0 has the tensors; each rank keeps the full ones or its shards.
        sent = self.ranks.distributed
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sent)
        set_model_state_dict(self.model, state[MODEL], options=options)
        # torch restores these as well: mixed kernels raise in an fp16 step, and eps depends on the
        # precision.
        for group in state[OPTIMIZER].get("param_groups", ()):
            for name in group.keys() & {"fused", "foreach", "capturable", "eps"}:
                group[name] = self.optimizer.defaults[name]
        set_optimizer_state_dict(self.model, self.optimizer, state[OPTIMIZER], options=options)
        self._begin_momentum()
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["device_rng"] is not None and self.compute.on_gpu:
            torch.cuda.set_rng_state(state["device_rng"], self.compute.device)
        self._generator.set_state(state["order_rng"])
        self._epoch_state = state["order_rng"]
        position = state["position"]
        self._go_to(*(int(position[name]) for name in ("step", "epoch", "offset")))
        self.best_loss = float(state["best_loss"])

    def _begin_momentum(self) -> None:
        """Initialize the momentum of fused SGD with zeros, which gives the same first step.

        torch allocates the buffers without a value, for its kernel to fill. In fp16 the kernel
        skips steps that overflow, as the first ones do, and the garbage would become momentum.
        """
        fused = self.config.optimizer_impl is OptimizerImpl.FUSED
        if fused and isinstance(self.optimizer, torch.optim.SGD):
            for weights in self.model.parameters():
                state = self.optimizer.state[weights]
                state.setdefault("momentum_buffer", torch.zeros_like(weights))

    def _go_to(self, step: int, epoch: int, offset: int) -> None:
        """Set the position, the number of the last step, and the learning rate."""
        self.step, self.epoch, self.offset = step, epoch, offset
        left = math.ceil((self.samples - offset) / self.config.step_size)
        total = step + left + (self.config.epochs - epoch) * self.steps_per_epoch
        self.total_steps = min(total, self.config.max_steps or total)
        self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        """Set the learning rate of the next step."""
        factor = learning_rate_factor(self.config, self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor


def learning_rate_factor(config: RunConfig, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in a step, counted from 0.

    Linear warm-up over `lr_warmup_steps` W: (step + 1) / (W + 1) (Goyal et al. 2017, section 2.2).
    Then 1, or for cosine decay (1 + cos(π (step - W) / (total_steps - W))) / 2 (Loshchilov and
    Hutter 2017, equation 5, without restarts).
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.lr_scheduler is not LRSchedule.COSINE:
        return 1.0
    done = (step - warmup) / max(1, total_steps - warmup)
    return (1 + math.cos(math.pi * min(done, 1.0))) / 2


def _optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    parameters, rate = model.parameters(), config.learning_rate
    fused = config.optimizer_impl is OptimizerImpl.FUSED
    foreach = config.optimizer_impl is OptimizerImpl.FOREACH
    if config.optimizer is Optimizer.SGD:
        return torch.optim.SGD(parameters, rate, MOMENTUM, fused=fused, foreach=foreach)
    kind = torch.optim.Adam if config.optimizer is Optimizer.ADAM else torch.optim.AdamW
    # The smallest fp16 number is 6e-8, so squared gradients below 8e-3, times 1 - beta2 = 1e-3, are
    # 0. With torch's default of 1e-8 the update would be 1e5 times too large.
    eps = 1e-3 if config.precision is Precision.PURE_FP16 else 1e-8
    capturable = config.cuda_graphs
    return kind(parameters, rate, eps=eps, capturable=capturable, fused=fused, foreach=foreach)


def save(path: Path, training: TrainState) -> int | None:
    """Write a checkpoint; return its bytes on rank 0. All ranks must call this. Raises OSError."""
    state = training.state_dict()
    return None if training.ranks.rank else write_checkpoint(path, state)
