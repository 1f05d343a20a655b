"""How much memory a device has free, without making a CUDA context on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from stepscope.sampling.nvml import DeviceSource, open_source
from stepscope.sampling.nvml_fields import Tier
from trainer.problems import TrainDevice

CGROUP = Path("/sys/fs/cgroup")


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


def host_memory(cgroup: Path = CGROUP) -> Free:
    """Return what the host can give this process, within the limit of its container."""
    memory = psutil.virtual_memory()
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None or limit >= memory.total:
        return Free(memory.available, memory.total)
    # The page cache counts as used, and goes when memory is needed.
    cache = _cache(cgroup / "memory.stat")
    return Free(min(memory.available, max(0, limit - used + cache)), limit)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no container, or the word "max" for no limit
        return None


def _cache(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    value = found.get("inactive_file", "0")
    return int(value) if value.isdecimal() else 0
