"""The memory estimate of a configuration, whether it fits, and the batch-size curve."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from stepscope.common.formatting import format_bytes
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import open_source
from stepscope.host.usage import container
from trainer.config import RunConfig, Runner, Strategy, Workload
from trainer.config_validation import TrainDevice
from trainer.custom_workload import place_in_user_code
from trainer.error_messages import RunFailedError
from trainer.lab.plan import speed_problem
from trainer.memory_estimate import ABSENT
from trainer.memory_estimate.allocator import AllocationCategory, PeakMemory, peak_memory
from trainer.memory_estimate.batch_size_finder import (
    Progress,
    curve,
    explore,
    measure,
    sizes_to_measure,
)
from trainer.memory_estimate.simulate import SimulatedStep, simulate_step

NOT_MEASURED = "The throughput of several ranks is not measured here."
MARGIN = 1.10  # Memory of kernels, which is not predicted, is a few percent.
CONTEXT = 512 * 2**20  # Assumed size of a process's CUDA context on a recent GPU.
ASSUMED = (9, 0)  # Compute capability if the GPU does not report it.
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
    """Bytes that a run needs, `outside` of torch too; `samples` per epoch limit a batch."""

    peak: PeakMemory
    outside: dict[str, int] = field(default_factory=dict)
    samples: int
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> int:
        """Bytes of torch's allocations, on a GPU with the cache."""
        return self.peak.allocated if self.peak.reserved is None else self.peak.reserved


def estimate_memory(config: RunConfig, device: TrainDevice) -> MemoryEstimate:
    """Predict the peak of each rank of a run; takes seconds. Raises RunFailedError."""
    if config.strategy in _NOT_PREDICTED:
        raise RunFailedError(_NOT_PREDICTED[config.strategy])
    capability = None if device.cuda_index is None else device.compute_capability or ASSUMED
    before = psutil.Process().memory_info().rss
    try:
        step = simulate_step(config, capability)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        place = place_in_user_code(error) if config.workload is Workload.CUSTOM else None
        raise RunFailedError(
            f"The model's code reads tensor values ({place or error}), and fake tensors have "
            "none. Run `stepscope measure-memory` on a script that trains it."
        ) from error
    peak = peak_memory(step.events, step.parts, on_gpu=capability is not None)
    outside = {"context": CONTEXT} if capability else _on_host(config, step, before)
    if config.strategy is Strategy.DDP:
        # As large as the weights, from the start.
        outside["gradient_buckets"] = peak.parts[AllocationCategory.PARAMETERS]
        if config.device == "cpu" and config.devices_per_node > 1:  # ranks share the host's memory
            each = peak.allocated + sum(outside.values())
            outside["other_ranks"] = (config.devices_per_node - 1) * each
    return MemoryEstimate(
        peak=peak,
        outside=outside,
        samples=step.samples,
        notes=(*step.notes, *((NCCL_NOTE,) if capability and config.distributed else ())),
    )


def compare_with_free(prediction: MemoryEstimate, free: FreeMemory) -> dict[str, Any]:
    """Return whether a prediction fits (or None), why, and the bytes it needs with the margin."""
    outside = sum(prediction.outside.values())
    needed = round(prediction.taken * MARGIN) + outside
    available = f"{format_bytes(free.bytes)} is free"
    least = prediction.taken + outside
    with_margin = f"{format_bytes(needed)} with a margin of {100 * (MARGIN - 1):.0f}%"
    fits, reason = None, free.reason or "Free memory is unknown."
    if free.bytes is not None and least > free.bytes:
        fits = False
        reason = f"Needs about {format_bytes(least)}; {available}. Use a smaller batch or model."
    elif free.bytes is not None and needed > free.bytes:
        reason = f"Close call: {with_margin}; {available}. Use a smaller batch."
    elif free.bytes is not None:
        fits, reason = True, f"Needs {with_margin}; {available}."
    return {"needed_bytes": needed, "fits": fits, "reason": reason}


def _on_host(config: RunConfig, step: SimulatedStep, process: int) -> dict[str, int]:
    """Return the host memory of a run on the CPU other than its tensors."""
    found = {"data_set": step.data_bytes} if step.data_bytes else {}
    if config.num_workers:
        batches = config.num_workers * config.prefetch_factor
        found["prefetched_batches"] = batches * step.batch_bytes
    if config.runner is not Runner.THREAD:
        found["process"] = process
    return found


def answer(
    config: RunConfig,
    device: TrainDevice,
    *,
    largest: bool = False,
    probe: bool = False,
    progress: Progress = lambda text, share: None,
) -> dict[str, Any]:
    """Return the estimate as JSON values. Raises RunFailedError and OSError."""
    began = time.perf_counter()
    progress("Simulating a step on fake tensors", 0.1)
    free = free_memory(device)  # before this process creates a CUDA context
    prediction = estimate_memory(config, device)
    found: dict[str, Any] = {
        "predicted_peak_bytes": prediction.peak.allocated,
        "parts": prediction.peak.parts,
        "predicted_reserved_bytes": prediction.peak.reserved,
        "outside": prediction.outside,
        "device": config.device,
        "device_name": device.name,
        "free_bytes": free.bytes,
        "total_bytes": free.total,
        "margin": {"factor": MARGIN},
        **compare_with_free(prediction, free),
        "notes": list(prediction.notes),
        "config": config.to_dict(),
    }
    if largest:
        found["largest"] = _largest(config, device, free, probe, progress)
    return found | {"seconds": round(time.perf_counter() - began, 3)}


def _largest(
    config: RunConfig, device: TrainDevice, free: FreeMemory, probe: bool, progress: Progress
) -> dict[str, Any]:
    count = 0

    def needs(size: int) -> tuple[int, int, int]:
        nonlocal count
        count += 1
        progress(f"Predicting batch size {size:,}", min(0.5, 0.3 + 0.02 * count))
        other = estimate_memory(replace(config, batch_size=size), device)
        return other.peak.allocated, compare_with_free(other, free)["needed_bytes"], other.samples

    points = explore(needs, config.batch_size, free.bytes)
    rates: dict[int, list[float]] = {}
    untimed = NOT_MEASURED if config.distributed else speed_problem(device.id)
    missed = [str(untimed)] if probe and untimed else []
    if probe and free.bytes is not None and not untimed:
        rates, missed = measure(
            config,
            sizes_to_measure(points, free.bytes),
            lambda text, share: progress(text, 0.5 + 0.5 * share),
        )
    return {**curve(points, free.bytes, rates), "not_measured": missed}


def free_memory(device: TrainDevice) -> FreeMemory:
    """Return a GPU's free memory from NVML, or the host's within its container's limit."""
    if device.id == ABSENT:
        return FreeMemory(None, None, "This GPU is not installed here, so its memory is unknown.")
    if device.cuda_index is None:
        memory, limits = psutil.virtual_memory(), container()
        total = min(limits.limit or memory.total, memory.total)
        return FreeMemory(limits.within(memory.available), total)
    source = open_source()
    used, reason = None, source.reason
    if reason is None:
        used = source.read(device.id, *SamplingTier).get("gpu/mem_used")
        reason = source.lost(device.id) or source.reasons(device.id).get("gpu/mem_used")
    if used is None:
        reason = f"Free memory is unknown: {reason or 'the driver does not report it'}"
        return FreeMemory(None, device.memory_total or None, f"{reason.rstrip('.')}.")
    totals = {info.uuid: info.memory_total for info in source.devices()}
    total = totals.get(device.id) or device.memory_total
    return FreeMemory(max(0, total - int(used)), total)
