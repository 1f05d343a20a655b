"""The predicted memory of a configuration, and whether it fits into the free memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from stepscope.common.formatting import format_bytes
from trainer.config import RunConfig, Runner, Strategy, Workload
from trainer.config_validation import TrainDevice
from trainer.custom_workload import place_in_user_code
from trainer.error_messages import RunFailedError
from trainer.memory_estimate.allocation_tracker import AllocationCategory
from trainer.memory_estimate.past_runs import DEFAULT, SafetyMargin
from trainer.memory_estimate.peak import PeakMemory, device_peak, host_peak
from trainer.memory_estimate.simulate import SimulatedStep, simulate_step

CONTEXT = 512 * 2**20
"""Assumed size of a process's CUDA context on a recent GPU."""
ASSUMED = (9, 0)
"""Compute capability if the GPU does not report it."""
NCCL_NOTE = "NCCL's own buffers are not included: about 100 MiB per GPU, more with many ranks."
_NOT_PREDICTED = {
    Strategy.FSDP: (
        "strategy: the peak of fsdp depends on when blocks are gathered and freed, which is not "
        "predicted. Set strategy to ddp for an upper bound, which counts the full gradients that "
        "no_sync keeps, or start the run and watch its memory."
    ),
    Strategy.DP: (
        "strategy: DataParallel replicates the model in each step, which is not predicted. "
        "Set strategy to ddp, or start the run and watch its memory."
    ),
}


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free and total bytes of a device; None if unknown, with the `reason`."""

    bytes: int | None
    total: int | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes that a run needs; `seconds` is the time that the prediction took.

    `device` is a name. `outside` is memory other than torch's allocations, `samples` the size of an
    epoch, which limits a batch.
    """

    config: RunConfig
    device: str
    peak: PeakMemory
    outside: dict[str, int] = field(default_factory=dict)
    samples: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> int:
        """Bytes that torch takes from the device: on a GPU with its cache."""
        return self.peak.allocated if self.peak.reserved is None else self.peak.reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Whether a prediction fits, None if unknown; `needed` are bytes with margin and `outside`."""

    fits: bool | None
    reason: str
    needed: int


def estimate_memory(config: RunConfig, device: TrainDevice) -> MemoryEstimate:
    """Predict the peak of a run, of several ranks that of each; takes seconds.

    Raises RunFailedError for unusable data, for a model that reads values, and for strategies that
    are not predicted.
    """
    if config.strategy in _NOT_PREDICTED:
        raise RunFailedError(_NOT_PREDICTED[config.strategy])
    began = time.perf_counter()
    capability = capability_of(device)
    before = psutil.Process().memory_info().rss
    try:
        played = simulate_step(config, capability)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        place = place_in_user_code(error) if config.workload is Workload.CUSTOM else None
        raise RunFailedError(
            f"The model's code reads tensor values ({place or error}), and fake tensors have "
            "none. Run `stepscope fit` on a script that trains it."
        ) from error
    peak = (device_peak if capability else host_peak)(played.events, played.parts)
    outside = {"context": CONTEXT} if capability else _on_host(config, played, before)
    if config.strategy is Strategy.DDP:
        # As large as the weights, from the start; with views the gradients lie in them.
        gradients = (
            peak.parts.get(AllocationCategory.GRADIENTS, 0) if config.gradient_as_bucket_view else 0
        )
        outside["gradient_buckets"] = max(0, peak.parts[AllocationCategory.PARAMETERS] - gradients)
        if (
            config.device == "cpu" and config.devices_per_node > 1
        ):  # all ranks share the host's memory
            each = peak.allocated + sum(outside.values())
            outside["other_ranks"] = (config.devices_per_node - 1) * each
    return MemoryEstimate(
        config=config,
        device=device.name,
        peak=peak,
        outside=outside,
        samples=played.samples,
        seconds=time.perf_counter() - began,
        notes=(*played.notes, *((NCCL_NOTE,) if capability and config.distributed else ())),
    )


def capability_of(device: TrainDevice) -> tuple[int, int] | None:
    """Return the compute capability to predict for; None for a CPU."""
    return None if device.cuda_index is None else device.compute_capability or ASSUMED


def compare_with_free(
    prediction: MemoryEstimate, free: FreeMemory, margin: SafetyMargin = DEFAULT
) -> FitResult:
    """Compare a prediction with the free memory. Pure."""
    outside = sum(prediction.outside.values())
    needed = round(prediction.taken * margin.factor) + outside
    if free.bytes is None:
        reason = free.reason or "Free memory is unknown."
        return FitResult(fits=None, reason=reason, needed=needed)
    available = f"{format_bytes(free.bytes)} is free"
    least = prediction.taken + outside
    with_margin = f"{format_bytes(needed)} with a margin of {100 * (margin.factor - 1):.0f}%"
    fits: bool | None = True
    reason = f"Needs {with_margin}; {available}."
    if least > free.bytes:
        fits = False
        reason = f"Needs about {format_bytes(least)}; {available}. Use a smaller batch or model."
    elif needed > free.bytes:
        fits = None
        reason = f"Close call: {with_margin}; {available}. Use a smaller batch."
    return FitResult(fits=fits, reason=reason, needed=needed)


def _on_host(config: RunConfig, played: SimulatedStep, process: int) -> dict[str, int]:
    """Return the host memory of a run on the CPU other than its tensors."""
    found = {"data_set": played.data_bytes} if played.data_bytes else {}
    if config.num_workers:
        batches = config.num_workers * config.prefetch_factor
        found["prefetched_batches"] = batches * played.batch_bytes
    if config.runner is not Runner.THREAD:
        found["process"] = process
    return found


def to_json(
    prediction: MemoryEstimate, verdict: FitResult, free: FreeMemory, margin: SafetyMargin
) -> dict[str, Any]:
    """Return the output of `python -m trainer.memory_estimate --json`."""
    return {
        "predicted_peak_bytes": prediction.peak.allocated,
        "parts": prediction.peak.parts,
        "predicted_reserved_bytes": prediction.peak.reserved,
        "outside": prediction.outside,
        "needed_bytes": verdict.needed,
        "device": prediction.config.device,
        "device_name": prediction.device,
        "free_bytes": free.bytes,
        "total_bytes": free.total,
        "margin": {"factor": margin.factor, "runs": margin.runs, "source": margin.source},
        "fits": verdict.fits,
        "reason": verdict.reason,
        "notes": list(prediction.notes),
        "seconds": round(prediction.seconds, 3),
        "config": prediction.config.to_dict(),
    }
