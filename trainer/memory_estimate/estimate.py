"""The answer for one configuration: prediction, safety margin, verdict, curve by batch size."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.host.usage import container
from trainer.config import RunConfig
from trainer.config_validation import TrainDevice
from trainer.memory_estimate.batch_size_finder import curve, explore
from trainer.memory_estimate.options import ABSENT
from trainer.memory_estimate.past_runs import SafetyMargin, margin_for
from trainer.memory_estimate.predict import (
    FreeMemory,
    capability_of,
    compare_with_free,
    estimate_memory,
    to_json,
)
from trainer.memory_estimate.probe import Report, measure, sizes_to_measure

NOT_MEASURED = "The throughput of several ranks is not measured here."


def answer(
    config: RunConfig,
    device: TrainDevice,
    root: Path,
    *,
    largest: bool = False,
    probe: bool = False,
    say: Report = lambda text, share: None,
) -> dict[str, Any]:
    """Return the answer as JSON values.

    Raises RunFailedError for unusable data, OSError if a measurement has no folder.
    """
    began = time.perf_counter()
    say("Simulating a step on fake tensors", 0.1)
    prediction = estimate_memory(config, device)
    free = free_memory(device)
    say("Reading earlier runs", 0.3)
    margin = margin_for(
        config,
        root,
        lambda other: estimate_memory(other, device).peak.allocated,
        capability_of(device),
    )
    found = to_json(prediction, compare_with_free(prediction, free, margin), free, margin)
    if largest:
        found["largest"] = _largest(config, device, free, margin, probe, say)
    found["seconds"] = round(time.perf_counter() - began, 3)
    return found


def _largest(
    config: RunConfig,
    device: TrainDevice,
    free: FreeMemory,
    margin: SafetyMargin,
    probe: bool,
    say: Report,
) -> dict[str, Any]:
    count = 0

    def needs(size: int) -> tuple[int, int, int]:
        nonlocal count
        count += 1
        say(f"Predicting batch size {size:,}", min(0.5, 0.3 + 0.02 * count))
        other = estimate_memory(replace(config, batch_size=size), device)
        return other.peak.allocated, compare_with_free(other, free, margin).needed, other.samples

    points = explore(needs, config.batch_size, free.bytes)
    rates: dict[int, list[float]] = {}
    missed = [NOT_MEASURED] if probe and config.distributed else []
    if probe and free.bytes is not None and not config.distributed:
        rates, missed = measure(
            config,
            sizes_to_measure(points, free.bytes),
            lambda text, share: say(text, 0.5 + 0.5 * share),
        )
    return {**curve(points, free.bytes, rates).to_json(), "not_measured": missed}


def free_memory(device: TrainDevice, source: DeviceSource | None = None) -> FreeMemory:
    """Return the free memory by NVML, or the host's within its container's limit.

    No CUDA context is created.
    """
    if device.id == ABSENT:
        return FreeMemory(None, None, "This GPU is not installed here, so its memory is unknown.")
    if device.cuda_index is None:
        memory, own = psutil.virtual_memory(), container()
        total = memory.total if own.limit is None else min(own.limit, memory.total)
        return FreeMemory(own.within(memory.available), total)
    source = source or open_source()
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
