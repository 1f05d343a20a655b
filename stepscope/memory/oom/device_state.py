"""Read what torch's allocator holds on a device at a failed allocation.

Called from the allocator's observer, when its lock is free. Allocates nothing and makes no call of
CUDA: counters, segments, live blocks with their stacks, and settings are the allocator's own. torch
is found in `sys.modules`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from stepscope.common.json_values import to_text
from stepscope.memory import allocator
from stepscope.memory.oom.record import (
    FIRST_PID,
    AllocatorSettings,
    OomAllocationSite,
    ProcessMemory,
    SegmentStats,
)
from stepscope.memory.snapshots.segments import largest_blocks

BLOCKS = 20
"""Live blocks that are kept, the largest."""
MOST_BLOCKS = 50_000
"""Blocks of a device up to which its segments are read: about 1 KB and 5 us each."""
FRAMES = 12
TEXT = 300
_COUNTERS: dict[str, tuple[str, ...]] = {
    "allocated": ("allocated_bytes", "all", "current"),
    "reserved": ("reserved_bytes", "all", "current"),
    "active": ("active_bytes", "all", "current"),
    "inactive_split": ("inactive_split_bytes", "all", "current"),
    "peak_allocated": ("allocated_bytes", "all", "peak"),
    "peak_reserved": ("reserved_bytes", "all", "peak"),
    "retries": ("num_alloc_retries",),
    "ooms": ("num_ooms",),
}
NO_STACKS = (
    "torch keeps the stacks of allocations only while a history is recorded, such as by "
    "torch.cuda.memory._record_memory_history(max_entries=100000)"
)


def counters(device: int) -> dict[str, int]:
    """Return the allocator's counters by the names of a record."""
    stats = sys.modules["torch"].cuda.memory_stats_as_nested_dict(device)
    found = {name: _follow(stats, path) for name, path in _COUNTERS.items()}
    return {name: value for name, value in found.items() if value is not None}


def blocks_held(device: int) -> int:
    """Return how many blocks the allocator holds of a device, free ones too."""
    stats = sys.modules["torch"].cuda.memory_stats_as_nested_dict(device)
    paths = (("active", "all", "current"), ("inactive_split", "all", "current"))
    return sum(_follow(stats, path) or 0 for path in paths)


def segments(device: int) -> list[dict[str, Any]]:
    """Return the segments of a device, as torch's snapshot has them, without their history."""
    memory = sys.modules["torch"].cuda.memory
    try:
        found = memory.memory_snapshot(include_traces=False)
    except TypeError:  # of torch before 2.11, which gives no history here
        found = memory.memory_snapshot()
    return [segment for segment in found if segment.get("device") == device]


def free_blocks(found: Iterable[Mapping[str, Any]], stream: int) -> SegmentStats:
    """Return the largest free blocks, those that `stream` may use and those it may not."""
    usable = elsewhere = private = count = 0
    for segment in found:
        count += 1
        is_private = tuple(segment.get("segment_pool_id") or (0, 0)) != (0, 0)
        blocks = segment.get("blocks") or ()
        free = [block["size"] for block in blocks if block.get("state") == "inactive"]
        if is_private:
            private += sum(free)
        largest = max(free, default=0)
        if is_private or segment.get("stream", 0) != stream:
            elsewhere = max(elsewhere, largest)
        else:
            usable = max(usable, largest)
    return SegmentStats(count=count, largest_free=usable, elsewhere=elsewhere, private=private)


def live_blocks(found: list[dict[str, Any]]) -> tuple[tuple[OomAllocationSite, ...], str | None]:
    """Return the largest live blocks, and why they have no stacks; None where they have."""
    if not any(frames_of(segment) for segment in found):
        return by_size(found), NO_STACKS
    blocks = tuple(
        OomAllocationSite(
            size=int(block.size),
            count=int(block.count),
            frames=tuple(to_text(frame)[-TEXT:] for frame in block.frames[:FRAMES]),
            module=None if block.module is None else to_text(block.module)[:TEXT],
        )
        for block in largest_blocks(found, count=BLOCKS)
    )
    return blocks, None


def frames_of(segment: Mapping[str, Any]) -> bool:
    """Say whether a history was recorded while some block of a segment was made."""
    return any(block.get("frames") for block in segment.get("blocks") or ())


def by_size(found: Iterable[Mapping[str, Any]]) -> tuple[OomAllocationSite, ...]:
    """Return the live blocks without their stacks, those of one size added up."""
    counts: dict[int, int] = {}
    for segment in found:
        for block in segment.get("blocks") or ():
            if block.get("state") == "active_allocated":
                counts[block["size"]] = counts.get(block["size"], 0) + 1
    ranked = sorted(counts, key=lambda size: -size * counts[size])[:BLOCKS]
    return tuple(OomAllocationSite(size=size * counts[size], count=counts[size]) for size in ranked)


def stream_of(device: int) -> int:
    """Return the number of the thread's current stream, 0 for the default one."""
    return int(sys.modules["torch"]._C._cuda_getCurrentRawStream(device))


def settings(device: int) -> AllocatorSettings:
    """Return the allocator's settings in force, by its own word and by the environment."""
    torch = sys.modules["torch"]
    text, given = allocator.environment_text(), allocator.in_force()
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = float(fraction(device)) if fraction is not None else None
    split = given.get("max_split_size_mb", "")
    return AllocatorSettings(
        backend=str(torch.cuda.memory.get_allocator_backend()),
        text=to_text(text or ",".join(f"{name}:{value}" for name, value in given.items()))[:TEXT],
        expandable_segments=allocator.expandable_segments(given),
        max_split_size=int(split) * 2**20 if split.isdecimal() else None,
        fraction=share if share is not None and share < 1 else None,
    )


def total_memory(device: int) -> int:
    """Return the device's memory in bytes, as torch keeps it."""
    return int(sys.modules["torch"].cuda.get_device_properties(device).total_memory)


def _follow(stats: Any, path: tuple[str, ...]) -> int | None:
    for name in path:
        if not isinstance(stats, Mapping) or name not in stats:
            return None
        stats = stats[name]
    return int(stats)


MOST = 20
NAME = 80
NOT_LISTED = "the driver does not list this process, as in some containers"
NO_MEMORY = "the driver does not give the memory of each process here"


@dataclass(frozen=True, slots=True)
class DeviceMemoryUsers:
    """Bytes of this process and of all others; `reason` says why they are not told apart."""

    own: int | None = None
    others: int | None = None
    processes: tuple[ProcessMemory, ...] = ()
    reason: str | None = None


def holders(uuid: str) -> DeviceMemoryUsers:
    """Return who holds a GPU's memory now. Raises nothing of NVML's."""
    try:
        _begin()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        listed = {
            int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory)
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
    except (pynvml.NVMLError, AttributeError, OSError) as error:
        return DeviceMemoryUsers(reason=f"NVML: {to_text(error)[:NAME]}")
    return shared_out(listed, os.getpid())


@functools.cache
def _begin() -> None:
    """Initialize NVML, once a process: some drivers fail after repeated inits."""
    pynvml.nvmlInit()


def shared_out(listed: dict[int, int | None], own_pid: int) -> DeviceMemoryUsers:
    """Tell this process from the others, as far as the list allows it."""
    if own_pid not in listed:
        return DeviceMemoryUsers(reason=NOT_LISTED)
    rest = {pid: memory for pid, memory in listed.items() if pid != own_pid}
    ranked = sorted(rest, key=lambda pid: -(rest[pid] or 0))[:MOST]
    found = tuple(_holder(pid, rest[pid]) for pid in ranked if pid >= FIRST_PID)
    if any(memory is None for memory in rest.values()):
        return DeviceMemoryUsers(own=listed[own_pid], processes=found, reason=NO_MEMORY)
    others = sum(memory or 0 for memory in rest.values())
    return DeviceMemoryUsers(own=listed[own_pid], others=others, processes=found)


def _holder(pid: int, memory: int | None) -> ProcessMemory:
    try:
        process = psutil.Process(pid)
        name, yours = process.name(), process.uids().real == os.getuid()
    except psutil.Error:  # it has just ended, or another container or user hides it
        name, yours = "", False
    return ProcessMemory(pid=pid, name=to_text(name)[:NAME], memory=memory, yours=yours)
