"""The state of a run that a checkpoint holds: model, optimizer, schedule, scaler, RNG, position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from trainer.config import Optimizer, Precision, RunConfig, Schedule
from trainer.training.checkpoint import CheckpointError
from trainer.training.compute import Compute
from trainer.training.precision import grad_scaler
from trainer.training.ranks import ALONE, Ranks
from trainer.training.sharding import spread_like
from trainer.traits import TRAITS, reads

MOMENTUM = 0.9
PLATEAU_FACTOR, PLATEAU_PATIENCE = 0.5, 3
SAME = (
    *("workload", "width", "layers", "context", "classes", "tied_head", "data"),
    *("own", "seed", "optimizer", "schedule"),
)
"""Settings that a resumed run must share with its checkpoint, as far as that has them and the
workload reads them; the seed where it makes the data."""


class Training:
    """All that changes while training; `load` restores what `state_dict` returned.

    `epoch` is the current one, counted from 1; `offset` of its samples are done, by all ranks
    together. So a checkpoint does not depend on how many ranks there were.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, compute: Compute, ranks: Ranks = ALONE
    ) -> None:
        self.config = config
        self.compute = compute
        self.ranks = ranks
        self.model = model
        self.optimizer = _optimizer(config, model)
        self._begin_momentum()
        self.schedule = _schedule(config, self.optimizer)
        self.scaler = grad_scaler(config.precision)
        self.step, self.epoch, self.offset = 0, 1, 0
        self.best_loss = math.inf
        self.saved = 0
        """Checkpoints that this process has written, or helped to."""
        self._generator = torch.Generator().manual_seed(config.seed)
        self._epoch_state = self._generator.get_state()

    def order(self, samples: int) -> Tensor:
        """Draw the sample order of the current epoch and return this rank's share of what is left.

        The order is the same on all ranks: their generators have one seed and one past.
        """
        self._epoch_state = self._generator.get_state()
        return self.ranks.share(torch.randperm(samples, generator=self._generator), self.offset)

    def next_epoch(self, validation_loss: float) -> None:
        """Close the epoch: move the schedule and the position."""
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(validation_loss)
        elif self.schedule is not None:
            self.schedule.step()
        self._epoch_state = self._generator.get_state()
        self.epoch += 1
        self.offset = 0

    @property
    def has_ended(self) -> bool:
        """Whether the last epoch or the last step is done."""
        limit = self.config.max_steps
        return self.epoch > self.config.epochs or 0 < limit <= self.step

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit (on a CPU): tensors and plain values only."""
        return {
            "config": self.config.to_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else {},
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": self.compute.rng_state(),
            # Of the epoch's start: its order is drawn again and `offset` samples are skipped.
            "order_rng": self._epoch_state,
            "position": {"step": self.step, "epoch": self.epoch, "offset": self.offset},
            "best_loss": self.best_loss,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises CheckpointError if it does not fit this run."""
        workload = self.config.workload
        for name in SAME:
            if not reads(workload, name) or (name == "seed" and not TRAITS[workload].seeded_data):
                continue
            ours = getattr(self.config, name)
            theirs = state["config"].get(name, ours)
            if theirs != ours:
                raise CheckpointError(
                    f"resume: the checkpoint was made with {name} {theirs}, got {ours}. "
                    f"Set {name} to {theirs}."
                )
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            detail = str(error).splitlines()[0]
            raise CheckpointError(
                f"resume: the checkpoint does not fit this run ({detail}). Choose another one."
            ) from error
        if self.epoch > self.config.epochs:
            raise CheckpointError(
                f"epochs: the checkpoint has {self.epoch - 1} epochs behind it, "
                f"got {self.config.epochs}. Raise epochs, which counts from the first run's start."
            )
        if self.has_ended:
            raise CheckpointError(
                f"max_steps: the checkpoint has {self.step} steps behind it, got "
                f"{self.config.max_steps}. Raise max_steps, counted from the first run's start."
            )

    def from_checkpoint(self, state: dict[str, Any]) -> tuple[list[str], dict[str, list[Any]]]:
        """Name what `load` took from the checkpoint, and the settings that differ: [then, now]."""
        theirs, ours = state["config"], self.config.to_dict()
        changed = {
            name: [theirs[name], value]
            for name, value in ours.items()
            if name != "resume" and name in theirs and theirs[name] != value
        }
        taken = ["weights", f"state of {self.config.optimizer}"]
        if self.schedule is not None:
            taken.append(f"place in the {self.config.schedule} schedule")
        if "learning_rate" not in changed:
            taken.append(f"learning rate {self.learning_rate:.4g}")
        if self.scaler.is_enabled() and state["scaler"]:
            taken.append(f"loss scale {state['scaler']['scale']:g}")
        return [*taken, "random numbers", "order of the samples"], changed

    def _load(self, state: dict[str, Any]) -> None:
        ours = self.model.state_dict()
        self.model.load_state_dict(
            {
                name: spread_like(value, ours[name]) if name in ours else value
                for name, value in state["model"].items()
            }
        )
        self._load_optimizer(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self._scale_rate(self.config.learning_rate / state["config"]["learning_rate"])
        if isinstance(self.schedule, CosineAnnealingLR):
            self._stretch(self.schedule)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["device_rng"] is not None:
            self.compute.set_rng_state(state["device_rng"])
        # Loaded at an epoch's end, the schedule moves before this optimizer's first step: torch
        # would warn of a wrong order.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._generator.set_state(state["order_rng"])
        self._epoch_state = state["order_rng"]
        position = state["position"]
        self.step, self.epoch, self.offset = (int(position[k]) for k in ("step", "epoch", "offset"))
        self.best_loss = float(state["best_loss"])

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        # torch takes the kernel from the checkpoint too: a fp16 step that mixes two kinds raises.
        kernel = _kernel(self.config)
        for group in state["param_groups"]:
            group.update({name: value for name, value in kernel.items() if name in group})
        for weights, number in zip(*_numbered(self.optimizer, state), strict=True):
            entries = state["state"].get(number, {})
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    entries[name] = spread_like(value, weights)
        self.optimizer.load_state_dict(state)
        self._begin_momentum()

    def _begin_momentum(self) -> None:
        """Start a fused SGD's momentum from zeros, which gives the same first step.

        torch's fused SGD allocates its buffers and leaves it to its kernel to fill them. In fp16
        the kernel returns early if a step overflows, as the first ones do, and then old contents
        of that memory count as momentum. Adam and AdamW fill their buffers with zeros.
        """
        if isinstance(self.optimizer, torch.optim.SGD) and self.config.fused:
            for weights in self.model.parameters():
                self.optimizer.state[weights].setdefault(
                    "momentum_buffer", torch.zeros_like(weights)
                )

    def _scale_rate(self, factor: float) -> None:
        """Apply a changed learning rate to the rates that the schedule has reached."""
        if factor == 1:
            return
        for group in self.optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] *= factor
        if isinstance(self.schedule, CosineAnnealingLR):
            self.schedule.base_lrs = [rate * factor for rate in self.schedule.base_lrs]

    def _stretch(self, schedule: CosineAnnealingLR) -> None:
        """Move the schedule's end to this run's: past its old end the rate would rise from 0."""
        epochs = self.config.epochs
        if schedule.T_max == epochs:
            return
        schedule.T_max = epochs
        done = schedule.last_epoch / epochs
        for group, rate in zip(self.optimizer.param_groups, schedule.base_lrs, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * done)) / 2


def _optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    parameters, rate = model.parameters(), config.learning_rate
    kernel = _kernel(config)
    if config.optimizer is Optimizer.SGD:
        return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, **kernel)
    kind = torch.optim.Adam if config.optimizer is Optimizer.ADAM else torch.optim.AdamW
    return kind(parameters, lr=rate, eps=_epsilon(config.precision), **kernel)


def _numbered(
    optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> tuple[list[Tensor], list[int]]:
    """Return the optimizer's parameters, and the numbers that they have in its saved state."""
    return (
        [weights for group in optimizer.param_groups for weights in group["params"]],
        [number for group in state["param_groups"] for number in group["params"]],
    )


def _kernel(config: RunConfig) -> dict[str, Any]:
    """Which kernel updates the weights: neither fused nor foreach is a loop over the parameters."""
    kernel = {"fused": config.fused, "foreach": config.foreach}
    if config.optimizer is not Optimizer.SGD:
        kernel["capturable"] = config.cuda_graphs
    return kernel


def _epsilon(precision: Precision) -> float:
    """What Adam adds to the root of the mean squared gradient before it divides by it.

    In fp16 the mean of the squares (1e-3 of each) of gradients below 8e-3 is 0, as the least number
    is 6e-8. Torch's own 1e-8 would make those steps 1e5 times too long.
    """
    return 1e-3 if precision is Precision.PURE_FP16 else 1e-8


def _schedule(
    config: RunConfig, optimizer: torch.optim.Optimizer
) -> CosineAnnealingLR | ReduceLROnPlateau | None:
    """The schedule, moved once an epoch."""
    if config.schedule is Schedule.COSINE:
        return CosineAnnealingLR(optimizer, T_max=config.epochs)
    if config.schedule is Schedule.PLATEAU:
        return ReduceLROnPlateau(optimizer, factor=PLATEAU_FACTOR, patience=PLATEAU_PATIENCE)
    return None
