"""Build the record of a failed allocation, of GPU or host memory.

The record is built at the allocation itself, or else from its error. Each part is read separately:
if one fails, its fields are missing and the record has the reason. Reading allocates no GPU memory
and calls no CUDA function: counters, segments and settings are those of torch's allocator.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import pynvml

from stepscope.common.clock import clock
from stepscope.common.json_values import to_text
from stepscope.gpu.nvml_device import NvmlDevice, NvmlLibrary
from stepscope.gpu.process_memory import NOT_LISTED, OTHERS, OWN, shares
from stepscope.gpu.processes import GpuProcess, GpuProcessList, ProcessInfoCache
from stepscope.gpu.source import nvml_uuid
from stepscope.host.usage import kills_since, own_container, resident
from stepscope.memory import allocator
from stepscope.memory.oom import call_stack
from stepscope.memory.oom.record import (
    MIN_PID,
    AllocatorSettings,
    HostMemory,
    MemoryKind,
    OomAllocationSite,
    OomRecord,
    ProcessMemory,
    RecentSamples,
    SegmentStats,
    bytes_in,
    figures_in,
)
from stepscope.memory.snapshots.segments import ACTIVE, FREE, blocks_of, pool_name
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable, module_of
from stepscope.metrics import Stream
from stepscope.recorder.recorder import Recorder

MAX_ROWS = 300  # Maximum number of samples in a record, the newest.
MAX_MESSAGE_CHARS, MAX_TEXT_CHARS, MAX_NAME_CHARS = 1500, 300, 80
MAX_SITES = 20  # Maximum number of allocation sites in a record, the largest.
MAX_FRAMES = 12
MAX_PROCESSES = 20
MAX_BLOCKS = 50_000
"""Maximum number of blocks on a device for reading its segments: about 1 KB and 5 us each."""
NO_STACKS = (
    "torch keeps the stacks of allocations only while a history is recorded, such as by "
    "torch.cuda.memory._record_memory_history(max_entries=100000)"
)
METRICS = ("memory/", "process/", "host/mem_", "gpu/mem_")
"""Prefixes of the metrics whose samples are in a record."""
Fields = dict[str, Any]  # Values of a record by the names of its fields.


@dataclass(eq=False, kw_only=True)
class FailureContext:
    """State of a run at its failures.

    `step` returns the last completed optimizer step. `own_parts` maps the end of a file's path to
    the part of a step, for a training loop without torch's classes. `mode_at_steps` returns True if
    a model was in training mode when steps ended, None if unknown. `first_kills` is the kernel's
    kill counter at the start, as in run.json.
    """

    recorder: Recorder
    step: Callable[[], int]
    first_step: int = 0
    own_parts: Mapping[str, str] = field(default_factory=dict)
    mode_at_steps: call_stack.TrainingModeLookup = lambda model: None
    first_kills: Any = None


class _RecordBuilder:
    """Reads the fields of a record part by part; a part that fails is listed and skipped."""

    def __init__(self, run: FailureContext, **fields: Any) -> None:
        step = run.step()
        self.fields: Fields = fields | {
            "ts": clock.now(),
            "step": step,
            "epoch": run.recorder.epoch,
            "steps_done": max(0, step - run.first_step),
        }
        self._failed: list[str] = []

    def read(self, part: str, call: Callable[..., Fields], *args: Any) -> None:
        try:
            self.fields |= call(*args)
        except Exception as error:  # noqa: BLE001 - of torch, NVML or the script's own objects
            self._failed.append(f"{part}: {type(error).__name__}: {to_text(error)[:100]}")

    def record(self) -> OomRecord:
        return OomRecord(**self.fields, incomplete="; ".join(self._failed) or None)


def at_allocation(
    run: FailureContext, device: int, requested: int, allowed: int, free: int, whole: bool
) -> OomRecord:
    """Return the record of an allocation that fails now; without `whole` only its fast parts."""
    builder = _RecordBuilder(
        run, device=device, requested=int(requested), allowed=int(allowed), free=int(free)
    )
    builder.read("counters", _counters, device)
    builder.read("device", _device, device)
    builder.read("settings", _settings, device)
    builder.read("stack", call_stack.here, run.own_parts, run.mode_at_steps)
    if whole:
        uuid = builder.fields.get("uuid")
        builder.read("segments", _segments, device)
        builder.read("processes", _holders, uuid)
        builder.read("samples", _samples, run, uuid)
    return builder.record()


def at_error(run: FailureContext, error: BaseException, memory: MemoryKind) -> OomRecord:
    """Return the record of a failure from its exception: the stack has unwound since."""
    message, trace = to_text(error), error.__traceback__
    builder = _RecordBuilder(run, memory=memory, message=message[:MAX_MESSAGE_CHARS])
    builder.read("stack", call_stack.of_traceback, trace, run.own_parts, run.mode_at_steps)
    if memory is MemoryKind.GPU:
        if allocator.reason() is None:
            device = sys.modules["torch"].cuda.current_device
            builder.read("device", lambda: _device(device()) | {"device": device()})
            builder.read("settings", lambda: _settings(device()))
        builder.fields |= figures_in(message)
        if "uuid" in builder.fields:
            builder.read("processes", _holders, builder.fields["uuid"])
    else:
        builder.fields["requested"] = bytes_in(message)
        builder.read("host", _host, run)
    builder.read("samples", _samples, run, builder.fields.get("uuid"))
    return builder.record()


def _counters(device: int) -> Fields:
    counters = allocator.read(device).items()
    return {key.removeprefix("memory/").removeprefix("alloc_"): int(n) for key, n in counters}


def _device(device: int) -> Fields:
    found = sys.modules["torch"].cuda.get_device_properties(device)
    return {"total": int(found.total_memory), "uuid": nvml_uuid(str(found.uuid), found.name)}


def _settings(device: int) -> Fields:
    """Return the settings in force, by torch and by the environment."""
    torch, in_force = sys.modules["torch"], allocator.in_force()
    text = allocator.environment_text() or ",".join(f"{k}:{v}" for k, v in in_force.items())
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    settings = AllocatorSettings(
        backend=str(torch.cuda.memory.get_allocator_backend()),
        text=to_text(text)[:MAX_TEXT_CHARS],
        expandable_segments=allocator.expandable_segments(in_force),
        fraction=float(fraction) if fraction < 1 else None,
    )
    return {"settings": settings}


def _segments(device: int) -> Fields:
    torch = sys.modules["torch"]
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    counts = (stats.get(name, {}).get("all", {}) for name in ("active", "inactive_split"))
    blocks = sum(int(count.get("current", 0)) for count in counts)
    if blocks > MAX_BLOCKS:
        reason = f"the allocator holds {blocks:,} blocks, too many to list at such a moment"
        return {"blocks_reason": reason}
    try:
        segments = torch.cuda.memory.memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.11, which returns no history here
        segments = torch.cuda.memory.memory_snapshot()
    segments = [segment for segment in segments if segment.get("device") == device]
    sites, why = live_blocks(segments)
    stream = int(torch._C._cuda_getCurrentRawStream(device))
    return {"segments": free_blocks(segments, stream), "blocks": sites, "blocks_reason": why}


def free_blocks(segments: Iterable[dict[str, Any]], stream: int) -> SegmentStats:
    """Return the largest free blocks that `stream` may use, and that it may not use."""
    usable = elsewhere = private = count = 0
    for segment in segments:
        count += 1
        free = [block.size for block in blocks_of(segment) if block.state == FREE]
        is_private = pool_name(segment) != ""
        if is_private:
            private += sum(free)
        if is_private or segment.get("stream", 0) != stream:
            elsewhere = max([elsewhere, *free])
        else:
            usable = max([usable, *free])
    return SegmentStats(count=count, largest_free=usable, elsewhere=elsewhere, private=private)


def live_blocks(
    segments: Iterable[dict[str, Any]],
) -> tuple[tuple[OomAllocationSite, ...], str | None]:
    """Return the largest allocation sites, by stack or else by size of a block.

    Also returns why no site has a stack, None if one has.
    """
    stacks = StackTable()
    sums: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for segment in segments:
        for block in blocks_of(segment):
            if block.state == ACTIVE:
                stack = stacks.number(block.frames)
                total = sums[stack, block.size if stack == NO_STACK else 0]
                total[0] += block.size
                total[1] += 1
    sites = []
    for (stack, _), (size, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:MAX_SITES]:
        frames = stacks.text(stack)
        shown = tuple(frame[-MAX_TEXT_CHARS:] for frame in frames[:MAX_FRAMES])
        module = (module_of(frames) or "")[:MAX_TEXT_CHARS] or None
        sites.append(OomAllocationSite(size=size, count=count, frames=shown, module=module))
    return tuple(sites), None if stacks.frames else NO_STACKS


@functools.cache
def _process_list(uuid: str) -> tuple[NvmlDevice, GpuProcessList]:
    """Initialize NVML once per process: some drivers fail after repeated inits."""
    pynvml.nvmlInit()
    gpu = NvmlDevice(uuid, NvmlLibrary(time.monotonic))
    return gpu, GpuProcessList(gpu, ProcessInfoCache())


def _holders(uuid: str | None) -> Fields:
    """Return the GPU memory of this process and of all others, by the driver."""
    if uuid is None:
        return {}
    try:
        gpu, listing = _process_list(uuid)
        processes = listing.read() if gpu.find() else None
    except (pynvml.NVMLError, AttributeError, OSError) as error:
        return {"others_reason": f"NVML: {to_text(error)[:MAX_NAME_CHARS]}"}
    if processes is None:
        return {"others_reason": gpu.lost or listing.reasons().get("processes", NOT_LISTED)}
    return shared_out(processes, os.getpid())


def shared_out(processes: Iterable[GpuProcess], own_pid: int) -> Fields:
    """Return the memory of this process and of all others; missing if the list is incomplete."""
    listed = sorted(processes, key=lambda process: -(process.memory or 0))
    own, others, reasons = shares(listed, own_pid, used=None, total=None)
    if own_pid not in [process.pid for process in listed]:
        return {"others_reason": reasons[OWN]}
    holders = tuple(
        ProcessMemory(
            pid=process.pid,
            name="" if process.state == "gone" else to_text(process.name)[:MAX_NAME_CHARS],
            memory=process.memory,
            yours=process.yours,
        )
        for process in listed
        if process.pid >= MIN_PID and process.pid != own_pid
    )
    fields = {"own": own, "others": others, "others_reason": reasons.get(OTHERS)}
    return fields | {"processes": holders[:MAX_PROCESSES]}


def _samples(run: FailureContext, uuid: str | None) -> Fields:
    """Return the recorder's samples of the last seconds.

    Samples carry the recorder's step, which may be some steps behind the loop's.
    """
    ahead = max(0, run.step() - run.recorder.step)
    device: dict[str, float] = {}
    rows = []
    for row in list(run.recorder.recent):
        known = ((key, value) for key, value in row.values.items() if value is not None)
        kept = {k: v for k, v in known if math.isfinite(v) and k.startswith(METRICS)}
        if row.stream == Stream.DEVICES and row.source == uuid:
            device |= kept
        elif row.stream == Stream.SAMPLES:
            rows.append((row.ts, row.step + ahead, device | kept))
    rows = rows[-MAX_ROWS:]
    columns = {
        key: tuple(values.get(key) for _, _, values in rows)
        for key in sorted({key for _, _, values in rows for key in values})
    }
    ts, steps = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    return {"readings": RecentSamples(ts=ts, steps=steps, columns=columns)}


def _host(run: FailureContext) -> Fields:
    memory, cgroup = psutil.virtual_memory(), own_container()
    shared_free = None
    with contextlib.suppress(OSError):  # DataLoader workers send batches through it
        shared_free = shutil.disk_usage("/dev/shm").free
    host = HostMemory(
        total=int(memory.total),
        available=int(memory.available),
        process=int(psutil.Process().memory_info().rss),
        children=resident(),
        limit=cgroup.limit,
        limit_used=cgroup.used,
        kills=kills_since(run.first_kills),
        shared_free=shared_free,
    )
    return {"host": host}
