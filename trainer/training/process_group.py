"""The connection between the ranks of a job: torch's process group, from its start to its end."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from trainer.config import RunConfig
from trainer.error_messages import RunFailedError
from trainer.training.rank_info import TrainerRank

log = logging.getLogger(__name__)


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
