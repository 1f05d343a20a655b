"""The ranks of a job: which one this process is, its share of the samples, the process group."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import RunConfig
from trainer.error_messages import RunFailedError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """This process among those that train together, by torchrun's numbers; by default it is alone.

    `rank` counts over all machines, `local_rank` on this one, which runs `local_size` of them.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 1

    @classmethod
    def of(cls, config: RunConfig, environ: Mapping[str, str]) -> TrainerRank:
        """Return what torchrun says in the environment; a run of one process does not look."""
        if not config.distributed:
            return cls()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        first = cls()
        alone = (first.rank, first.local_rank, first.world_size, first.local_size)
        numbers = (
            int(text) if (text := environ.get(name, "")).isdecimal() else default
            for name, default in zip(names, alone, strict=True)
        )
        return cls(*numbers)

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.world_size > 1

    def share(self, order: Tensor, offset: int = 0) -> Tensor:
        """Return this rank's samples of an epoch's `order` (int64, 1-d) after the first `offset`.

        All ranks get equally many: the order goes on from its beginning where too few are left.
        From offset 0 this is what torch's DistributedSampler gives. The k-th batch of all ranks
        together is the k-th batch of one process whose batches are `world_size` times as large.
        """
        if not self.several:
            return order[offset:]
        places = torch.arange(self.count(len(order) - offset)) * self.world_size
        return order[(places + offset + self.rank) % len(order)]

    def count(self, samples: int) -> int:
        """Return how many of so many samples each rank takes, the repeated ones included."""
        return -(-samples // self.world_size)

    def own(self, samples: int) -> int:
        """Return how many of so many samples this rank takes that no other rank takes too."""
        return len(range(self.rank, samples, self.world_size))

    def sum(self, values: Tensor) -> Tensor:
        """Add up the values of all ranks, in place, and return them. All ranks have to call it."""
        if self.several:
            dist.all_reduce(values)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the values of rank 0, in place. All ranks have to call it."""
        if self.several:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def begin_random(self, seed: int, step: int) -> None:
        """Give each of several ranks random numbers of its own, as of dropout, from a step on.

        Before, all have the same: the first weights come from them. Rank 0 of a resumed run goes on
        with those of the checkpoint.
        """
        if not self.several or (step and not self.rank):
            return
        later = np.random.SeedSequence((seed, self.rank, step)).generate_state(1)[0]
        torch.manual_seed(int(later) if step else seed + self.rank)

    def seeded(self, config: RunConfig) -> RunConfig:
        """Return the configuration with another seed for each rank, for what loads its data."""
        return replace(config, seed=(config.seed + self.rank) % 2**31)


ALONE = TrainerRank()


def init_process_group(config: RunConfig, ranks: TrainerRank, device: torch.device) -> None:
    """Connect this rank with the others: by NCCL between GPUs, by gloo between CPUs.

    Waits until all of them have come. A run of one process has no group, and one that is there is
    used. Raises RunFailedError where this process is not one of the job that the configuration
    asks for.
    """
    if not config.distributed or dist.is_initialized():
        return
    if ranks.world_size != config.world_size or "MASTER_ADDR" not in os.environ:
        raise RunFailedError(
            f"devices_per_node: the settings are for {config.world_size} processes, got "
            f"{ranks.world_size}. Start devices_per_node × num_nodes processes with torchrun."
        )
    if device.type == "cpu":
        dist.init_process_group("gloo")
        return
    # Parameters that lie on the host are clipped there, which takes a sum over all ranks.
    backend = "cpu:gloo,cuda:nccl" if config.cpu_offload else "nccl"
    dist.init_process_group(backend, device_id=device)


def destroy_process_group() -> None:
    """End the connection, if there is one. Only where no rank is left within a collective.

    After a failure others may be in one and wait for this rank: gloo's end would wait for them, and
    so does its abort. The process then has to end by os._exit, without the interpreter's own end.
    gloo's other ranks hear of it at once, those of NCCL are ended by torchrun.
    """
    if not dist.is_initialized():
        return
    try:
        dist.destroy_process_group()
    except RuntimeError as error:  # another rank failed meanwhile; this one has done its work
        log.warning("the process group did not end cleanly: %s", error)
