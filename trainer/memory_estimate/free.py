"""How much memory a device has free, without making a CUDA context on it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from stepscope.gpu.nvml_queries import Tier
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.host.usage import container
from trainer.config_validation import TrainDevice


@dataclass(frozen=True, slots=True)
class Free:
    """Free and all bytes of a device; None where they are unknown, for the `reason`."""

    bytes: int | None
    total: int | None
    reason: str | None = None


def free_memory(device: TrainDevice, source: DeviceSource | None = None) -> Free:
    """Ask the driver about a GPU, the system about the host's memory."""
    if device.cuda_index is None:
        return host_memory()
    source = source or open_source()
    if source.reason is not None:
        return Free(None, device.memory_total or None, f"Free memory is unknown: {source.reason}")
    used = source.read(device.id, *Tier).get("gpu/mem_used")
    if used is None:
        why = source.lost(device.id) or source.reasons(device.id).get("gpu/mem_used")
        reason = f"Free memory is unknown: {why or 'the driver does not tell it'}."
        return Free(None, device.memory_total or None, reason)
    totals = {info.uuid: info.memory_total for info in source.devices()}
    total = totals.get(device.id) or device.memory_total
    return Free(max(0, total - int(used)), total)


def host_memory() -> Free:
    """Return what the host can give this process, within the limit of its container."""
    memory, own = psutil.virtual_memory(), container()
    total = memory.total if own.limit is None else min(own.limit, memory.total)
    return Free(own.within(memory.available), total)
