"""Build the record of a failed allocation, of GPU or host memory.

The record is built at the allocation itself, or else from its error. Each part is read separately:
if one fails, its fields are missing and the record has the reason. Reading allocates no GPU memory
and calls no CUDA function: counters and settings are those of torch's allocator.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from stepscope.common.clock import clock
from stepscope.common.json_values import to_text
from stepscope.gpu.processes import OTHERS, OWN, OWN_NOT_LISTED, GpuProcess, shares
from stepscope.gpu.source import nvml_uuid, open_source
from stepscope.host.usage import container, kills_since, resident
from stepscope.memory import allocator
from stepscope.memory.oom import call_stack
from stepscope.memory.oom.record import (
    AllocatorSettings,
    HostMemory,
    MemoryKind,
    OomRecord,
    ProcessMemory,
    RecentSamples,
)
from stepscope.metrics import Stream
from stepscope.recorder.recorder import Recorder

MAX_ROWS = 300  # Maximum number of samples in a record, the newest.
MAX_MESSAGE_CHARS, MAX_TEXT_CHARS, MAX_NAME_CHARS = 1500, 300, 80
MAX_PROCESSES = 20
MAX_BYTES = 2**62  # Maximum size that is read from a message.
COUNTERS = ("allocated", "reserved", "peak_allocated")
METRICS = ("memory/allocated", "memory/peak_allocated")
"""Metrics whose samples are in a record: a verdict needs them."""
Fields = dict[str, Any]  # Values of a record by the names of its fields.
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_REQUEST = re.compile(r"[Tt]ried to allocate ([0-9]{1,20}(?:\.[0-9]+)?) (bytes|[KMGT]iB)")


@dataclass(eq=False, kw_only=True)
class FailureContext:
    """State of a run at its failures.

    `step` returns the last completed optimizer step. `own_parts` maps the end of a file's path to
    the part of a step, for a training loop without torch's classes. `first_kills` is the kernel's
    kill counter at the start, as in run.json.
    """

    recorder: Recorder
    step: Callable[[], int]
    first_step: int = 0
    own_parts: Mapping[str, str] = field(default_factory=dict)
    first_kills: Any = None


class _RecordBuilder:
    """Reads the fields of a record part by part; a part that fails is listed and skipped."""

    def __init__(self, run: FailureContext, **fields: Any) -> None:
        step = run.step()
        done = max(0, step - run.first_step)
        self.fields: Fields = fields | {"ts": clock.now(), "step": step, "steps_done": done}
        self._failed: list[str] = []

    def read(self, part: str, call: Callable[..., Fields], *args: Any) -> None:
        try:
            self.fields |= call(*args)
        except Exception as error:  # noqa: BLE001 - of torch, NVML or the script's own objects
            self._failed.append(f"{part}: {type(error).__name__}: {to_text(error)[:100]}")

    def record(self) -> OomRecord:
        return OomRecord(**self.fields, incomplete="; ".join(self._failed) or None)


def at_allocation(
    run: FailureContext, device: int, requested: int, allowed: int, free: int
) -> OomRecord:
    """Return the record of an allocation that fails now; sizes in bytes."""
    builder = _RecordBuilder(
        run, device=device, requested=int(requested), allowed=int(allowed), free=int(free)
    )
    builder.read("counters", _counters, device)
    builder.read("device", _device, device)
    builder.read("settings", _settings)
    builder.read("stack", call_stack.here, run.own_parts)
    builder.read("processes", _holders, builder.fields.get("uuid"))
    builder.read("samples", _samples, run)
    return builder.record()


def at_error(run: FailureContext, error: BaseException, memory: MemoryKind) -> OomRecord:
    """Return the record of a failure from its exception: the stack has unwound since."""
    message = to_text(error)[:MAX_MESSAGE_CHARS]
    builder = _RecordBuilder(run, memory=memory, message=message, requested=bytes_in(message))
    builder.read("stack", call_stack.of_traceback, error.__traceback__, run.own_parts)
    if memory is not MemoryKind.GPU:
        builder.read("host", _host, run)
    return builder.record()


def bytes_in(message: str) -> int | None:
    """Return the requested size in torch's message; None without one.

    >>> bytes_in("CUDA out of memory. Tried to allocate 2.00 GiB.")
    2147483648
    """
    match = _REQUEST.search(message)
    return None if match is None else min(int(float(match[1]) * _UNITS[match[2]]), MAX_BYTES)


def _counters(device: int) -> Fields:
    counters = allocator.read(device)
    return {key: int(counters[f"memory/{key}"]) for key in COUNTERS if f"memory/{key}" in counters}


def _device(device: int) -> Fields:
    found = sys.modules["torch"].cuda.get_device_properties(device)
    return {"total": int(found.total_memory), "uuid": nvml_uuid(str(found.uuid), found.name)}


def _settings() -> Fields:
    """Return the settings in force, by torch and by the environment."""
    in_force = allocator.in_force()
    text = allocator.environment_text() or ",".join(f"{k}:{v}" for k, v in in_force.items())
    settings = AllocatorSettings(
        backend=str(sys.modules["torch"].cuda.memory.get_allocator_backend()),
        text=to_text(text)[:MAX_TEXT_CHARS],
        expandable_segments=allocator.expandable_segments(in_force),
    )
    return {"settings": settings}


def _holders(uuid: str | None) -> Fields:
    """Return the GPU memory of all other processes, by the driver."""
    if uuid is None:
        return {}
    source = open_source(reader="out of memory")
    processes = source.processes(uuid)
    if processes is None:
        reason = source.reason or source.lost(uuid) or source.reasons(uuid).get("processes")
        return {"others_reason": reason or OWN_NOT_LISTED}
    return shared_out(processes, os.getpid())


def shared_out(processes: Iterable[GpuProcess], own_pid: int) -> Fields:
    """Return the memory of all other processes; missing if the list is incomplete."""
    listed = sorted(processes, key=lambda process: -(process.memory or 0))
    _, others, reasons = shares(listed, own_pid, used=None, total=None)
    if own_pid not in [process.pid for process in listed]:
        return {"others_reason": reasons[OWN]}
    holders = tuple(
        ProcessMemory(
            pid=process.pid,
            name="" if process.state == "gone" else to_text(process.name)[:MAX_NAME_CHARS],
            memory=process.memory,
        )
        for process in listed
        if process.pid not in (0, 1, own_pid)  # 1 is the init process, or the container's own
    )
    reason = reasons.get(OTHERS)
    return {"others": others, "others_reason": reason, "processes": holders[:MAX_PROCESSES]}


def _samples(run: FailureContext) -> Fields:
    """Return the recorder's samples of the last seconds.

    Samples carry the recorder's step, which may be some steps behind the loop's.
    """
    ahead = max(0, run.step() - run.recorder.step)
    rows = [row for row in list(run.recorder.recent) if row.stream == Stream.SAMPLES][-MAX_ROWS:]
    samples = RecentSamples(
        ts=tuple(row.ts for row in rows),
        steps=tuple(row.step + ahead for row in rows),
        columns={key: tuple(row.values.get(key) for row in rows) for key in METRICS},
    )
    return {"readings": samples}


def _host(run: FailureContext) -> Fields:
    memory, cgroup = psutil.virtual_memory(), container()
    host = HostMemory(
        total=int(memory.total),
        available=int(memory.available),
        process=int(psutil.Process().memory_info().rss),
        children=resident(),
        limit=cgroup.limit,
        limit_used=cgroup.used,
        kills=kills_since(run.first_kills),
    )
    return {"host": host}
