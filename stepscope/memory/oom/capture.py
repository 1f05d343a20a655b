"""Build the record of a failed allocation, of GPU or host memory.

It is built at the allocation itself, or else from its error. Each part is read separately: a part
that fails is missing, and the record has the reason. Reading allocates no GPU memory and makes no
call of CUDA: counters, segments and settings are those of torch's allocator.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import pynvml

from stepscope.common.clock import clock
from stepscope.common.json_values import to_text
from stepscope.gpu.nvml_device import NvmlDevice, NvmlLibrary
from stepscope.gpu.process_memory import NO_MEMORY, NOT_LISTED
from stepscope.gpu.processes import GpuProcess, GpuProcessList, ProcessInfoCache
from stepscope.gpu.source import nvml_uuid
from stepscope.host.usage import kills_since, own_container, resident
from stepscope.memory import allocator
from stepscope.memory.oom import call_stack
from stepscope.memory.oom.record import (
    FIRST_PID,
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
from stepscope.memory.snapshots.stacks import module_of, stack_texts
from stepscope.metrics import Stream
from stepscope.recorder.recorder import Recorder

WINDOW_S = 30.0
ROWS = 300
MESSAGE = 1500
BLOCKS = 20  # Live blocks that are kept, the largest.
MOST_BLOCKS = 50_000
"""Blocks of a device up to which its segments are read: about 1 KB and 5 us each."""
FRAMES = 12
TEXT = 300
NAME = 80
PROCESSES = 20
NO_STACKS = (
    "torch keeps the stacks of allocations only while a history is recorded, such as by "
    "torch.cuda.memory._record_memory_history(max_entries=100000)"
)
_RECORDED = ("memory/", "process/", "host/mem_", "gpu/mem_")
"""Beginnings of the metrics whose samples are kept."""
Fields = dict[str, Any]  # Values of a record by the names of its fields.


@dataclass(eq=False, kw_only=True)
class FailureContext:
    """State of a run at its failures.

    `step` returns the last optimizer step that ended, and `own_parts` gives the part of a step by
    the end of a file's path, for a loop that is not of torch's classes. `mode_at_steps` returns
    True if a model was in training mode when steps ended, None if not known. `first_kills` is the
    kernel's counter of kills at the start, as in run.json.
    """

    recorder: Recorder
    step: Callable[[], int]
    first_step: int = 0
    own_parts: Mapping[str, str] = field(default_factory=dict)
    mode_at_steps: Callable[[Any], bool | None] = lambda model: None
    first_kills: Any = None


class _RecordBuilder:
    """Reads the fields of a record part by part; a part that fails is noted and left out."""

    def __init__(self, run: FailureContext) -> None:
        step = run.step()
        self.fields: Fields = {
            "ts": clock.now(),
            "step": step,
            "epoch": run.recorder.epoch,
            "steps_done": max(0, step - run.first_step),
        }
        self._failed: list[str] = []

    def read(self, what: str, call: Callable[..., Fields], *args: Any) -> None:
        try:
            self.fields |= call(*args)
        except Exception as error:  # noqa: BLE001 - of torch, NVML or the script's own objects
            self._failed.append(f"{what}: {type(error).__name__}: {to_text(error)[:100]}")

    def record(self) -> OomRecord:
        return OomRecord(**self.fields, incomplete="; ".join(self._failed) or None)


def at_allocation(
    run: FailureContext, device: int, requested: int, allowed: int, free: int, whole: bool
) -> OomRecord:
    """Return the record of an allocation that fails now; without `whole` only its fast parts."""
    built = _RecordBuilder(run)
    built.fields |= {"device": device, "requested": int(requested)}
    built.fields |= {"allowed": int(allowed), "free": int(free)}
    built.read("counters", _counters, device)
    built.read("device", _device, device)
    built.read("settings", _settings, device)
    built.read("stack", call_stack.here, run.own_parts, run.mode_at_steps)
    if whole:
        uuid = built.fields.get("uuid")
        built.read("segments", _segments, device)
        built.read("processes", _holders, run, uuid)
        built.read("samples", _readings, run, uuid)
    return built.record()


def at_error(run: FailureContext, error: BaseException, memory: MemoryKind) -> OomRecord:
    """Return the record of a failure from its exception: the stack has unwound since."""
    built = _RecordBuilder(run)
    said = to_text(error)
    built.fields |= {"memory": memory, "message": said[:MESSAGE]}
    trace = error.__traceback__
    built.read("stack", call_stack.of_traceback, trace, run.own_parts, run.mode_at_steps)
    if memory is MemoryKind.GPU:
        if allocator.reason() is None:
            device = sys.modules["torch"].cuda.current_device
            built.read("device", lambda: _device(device()) | {"device": device()})
            built.read("settings", lambda: _settings(device()))
        built.fields |= figures_in(said)
        if "uuid" in built.fields:
            built.read("processes", _holders, run, built.fields["uuid"])
    else:
        built.fields["requested"] = bytes_in(said)
        built.read("host", _host, run)
    built.read("samples", _readings, run, built.fields.get("uuid"))
    return built.record()


def _counters(device: int) -> Fields:
    found = allocator.read(device)
    names = {key: key.removeprefix("memory/").removeprefix("alloc_") for key in found}
    return {names[key]: int(value) for key, value in found.items()}


def _device(device: int) -> Fields:
    found = sys.modules["torch"].cuda.get_device_properties(device)
    return {"total": int(found.total_memory), "uuid": nvml_uuid(str(found.uuid), found.name)}


def _settings(device: int) -> Fields:
    """Return the settings in force, by torch and by the environment."""
    torch = sys.modules["torch"]
    text, given = allocator.environment_text(), allocator.in_force()
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    found = AllocatorSettings(
        backend=str(torch.cuda.memory.get_allocator_backend()),
        text=to_text(text or ",".join(f"{name}:{value}" for name, value in given.items()))[:TEXT],
        expandable_segments=allocator.expandable_segments(given),
        fraction=float(fraction) if fraction < 1 else None,
    )
    return {"settings": found}


def _segments(device: int) -> Fields:
    torch = sys.modules["torch"]
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    counts = (stats.get(name, {}).get("all", {}) for name in ("active", "inactive_split"))
    held = sum(int(count.get("current", 0)) for count in counts)
    if held > MOST_BLOCKS:
        reason = f"the allocator holds {held:,} blocks, too many to list at such a moment"
        return {"blocks_reason": reason}
    try:
        found = torch.cuda.memory.memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.11, which returns no history here
        found = torch.cuda.memory.memory_snapshot()
    mine = [segment for segment in found if segment.get("device") == device]
    blocks, why = live_blocks(mine)
    stream = int(torch._C._cuda_getCurrentRawStream(device))
    return {"segments": free_blocks(mine, stream), "blocks": blocks, "blocks_reason": why}


def free_blocks(segments: Iterable[dict[str, Any]], stream: int) -> SegmentStats:
    """Return the largest free blocks, those that `stream` may use and those it may not."""
    usable = elsewhere = private = count = 0
    for segment in segments:
        count += 1
        free = [block.size for block in blocks_of(segment) if block.state == FREE]
        largest, is_private = max(free, default=0), pool_name(segment) != ""
        if is_private:
            private += sum(free)
        if is_private or segment.get("stream", 0) != stream:
            elsewhere = max(elsewhere, largest)
        else:
            usable = max(usable, largest)
    return SegmentStats(count=count, largest_free=usable, elsewhere=elsewhere, private=private)


def live_blocks(
    segments: Iterable[dict[str, Any]],
) -> tuple[tuple[OomAllocationSite, ...], str | None]:
    """Return the largest sums of live blocks, by stack or else by size.

    Also returns why none has a stack, None if one has.
    """
    sums: dict[tuple[str, ...] | int, list[int]] = {}
    stacks: dict[int, tuple[str, ...]] = {}  # torch shares one list among blocks of a stack
    for segment in segments:
        for block in blocks_of(segment):
            if block.state == ACTIVE:
                if id(block.frames) not in stacks:
                    stacks[id(block.frames)] = stack_texts(block.frames)
                one = sums.setdefault(stacks[id(block.frames)] or block.size, [0, 0])
                one[0] += block.size
                one[1] += 1
    blocks = []
    for key in sorted(sums, key=lambda key: -sums[key][0])[:BLOCKS]:
        frames: tuple[str, ...] = () if isinstance(key, int) else key
        shown = tuple(frame[-TEXT:] for frame in frames[:FRAMES])
        module = (module_of(frames) or "")[:TEXT] or None
        blocks.append(
            OomAllocationSite(size=sums[key][0], count=sums[key][1], frames=shown, module=module)
        )
    has_stacks = any(not isinstance(key, int) for key in sums)
    return tuple(blocks), None if has_stacks else NO_STACKS


@functools.cache
def _process_list(uuid: str) -> tuple[NvmlDevice, GpuProcessList]:
    """Initialize NVML once a process: some drivers fail after repeated inits."""
    pynvml.nvmlInit()
    gpu = NvmlDevice(uuid, NvmlLibrary(time.monotonic))
    return gpu, GpuProcessList(gpu, ProcessInfoCache())


def _holders(run: FailureContext, uuid: str | None) -> Fields:
    """Return who holds the GPU's memory; if that is hidden, the last sample of it."""
    if uuid is None:
        return {}
    found = _listed_holders(uuid)
    if found.get("others") is None:
        rows = [row for row in reversed(list(run.recorder.recent)) if row.source == uuid]
        values = (_finite(row.values.get("gpu/mem_others")) for row in rows)
        others = next((int(value) for value in values if value is not None), None)
        if others is not None:
            found |= {"others": others, "others_reason": None}
    return found


def _listed_holders(uuid: str) -> Fields:
    try:
        gpu, listing = _process_list(uuid)
        processes = listing.read() if gpu.find() else None
    except (pynvml.NVMLError, AttributeError, OSError) as error:
        return {"others_reason": f"NVML: {to_text(error)[:NAME]}"}
    if processes is None:
        return {"others_reason": gpu.lost or listing.reasons().get("processes", NOT_LISTED)}
    return shared_out(processes, os.getpid())


def shared_out(processes: Iterable[GpuProcess], own_pid: int) -> Fields:
    """Divide the memory into that of this process and of all others."""
    listed = {one.pid: one for one in processes}
    own = listed.pop(own_pid, None)
    if own is None:
        return {"others_reason": NOT_LISTED}
    ranked = sorted(listed.values(), key=lambda one: -(one.memory or 0))[:PROCESSES]
    found = {
        "own": own.memory,
        "processes": tuple(
            ProcessMemory(
                pid=one.pid,
                name="" if one.state == "gone" else to_text(one.name)[:NAME],
                memory=one.memory,
                yours=one.yours,
            )
            for one in ranked
            if one.pid >= FIRST_PID
        ),
    }
    if any(one.memory is None for one in listed.values()):
        return found | {"others_reason": NO_MEMORY}
    return found | {"others": sum(one.memory or 0 for one in listed.values())}


def _readings(run: FailureContext, uuid: str | None) -> Fields:
    """Return the samples of the last WINDOW_S seconds that the recorder still has.

    Samples carry the recorder's step, which may be some steps behind the loop's.
    """
    since = clock.now() - WINDOW_S
    ahead = max(0, run.step() - run.recorder.step)
    device: dict[str, float] = {}
    rows = []
    for row in list(run.recorder.recent):
        values = ((key, _finite(value)) for key, value in row.values.items())
        kept = {k: v for k, v in values if v is not None and k.startswith(_RECORDED)}
        if row.ts >= since and row.stream == Stream.DEVICES and row.source == uuid:
            device |= kept
        elif row.ts >= since and row.stream == Stream.SAMPLES:
            rows.append((row.ts, row.step + ahead, device | kept))
    rows = rows[-ROWS:]
    columns = {
        key: tuple(values.get(key) for _, _, values in rows)
        for key in sorted({key for _, _, values in rows for key in values})
    }
    found = RecentSamples(
        ts=tuple(ts for ts, _, _ in rows), steps=tuple(step for _, step, _ in rows), columns=columns
    )
    return {"readings": found}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _host(run: FailureContext) -> Fields:
    memory, found = psutil.virtual_memory(), own_container()
    shared_free = None
    with contextlib.suppress(OSError):  # DataLoader workers send batches through it
        shared_free = shutil.disk_usage("/dev/shm").free
    host = HostMemory(
        total=int(memory.total),
        available=int(memory.available),
        process=int(psutil.Process().memory_info().rss),
        children=resident(),
        limit=found.limit,
        limit_used=found.used,
        kills=kills_since(run.first_kills),
        shared_free=shared_free,
    )
    return {"host": host}
