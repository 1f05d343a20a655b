"""What several devices add to the memory of a step that one process predicts."""

from __future__ import annotations

from trainer.config import Parallel, RunConfig
from trainer.memory_estimate.allocation_tracker import Part
from trainer.memory_estimate.peak import Peak

NCCL_NOTE = "NCCL's own buffers are not included: about 100 MiB per GPU, more with many ranks."
NOT_MEASURED = "The throughput of several ranks is not measured here."
_REFUSED = {
    Parallel.FSDP: (
        "parallel: the peak of fsdp depends on when blocks are gathered and freed, which is not "
        "predicted. Set parallel to ddp for an upper bound, which counts the whole gradients that "
        "no_sync keeps, or start the run and look."
    ),
    Parallel.DP: (
        "parallel: DataParallel replicates the model every step, which is not predicted. Use "
        "ddp, or start the run and watch."
    ),
}


def refusal(config: RunConfig) -> str | None:
    """Say why nothing is predicted for this kind of parallelism; None where it is."""
    return _REFUSED.get(config.parallel)


def buckets(config: RunConfig, peak: Peak) -> dict[str, int]:
    """Return the bytes of DDP's buckets on each device; nothing for other kinds.

    They hold all gradients, as large as the weights, from the start. With views into them the
    gradients take no memory besides.
    """
    if config.parallel is not Parallel.DDP:
        return {}
    whole = peak.parts[Part.PARAMETERS]
    gradients = peak.parts.get(Part.GRADIENTS, 0) if config.bucket_view else 0
    return {"gradient_buckets": max(0, whole - gradients)}


def other_ranks(config: RunConfig, each: int) -> dict[str, int]:
    """Return the bytes of the other ranks, which share the host's memory if they train on CPUs."""
    if config.parallel is not Parallel.DDP or config.device != "cpu" or config.ranks == 1:
        return {}
    return {"other_ranks": (config.ranks - 1) * each}
