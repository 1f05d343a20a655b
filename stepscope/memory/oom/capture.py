"""Build the record of a failed allocation, of GPU or host memory.

The record is built at the allocation itself, or else from its error. Each group of values is read
separately: if reading one fails, its values are missing and the record has the reason. Reading
allocates no GPU memory and calls no CUDA function: counters and settings are those of torch's
allocator. No frame of the stack is kept.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from stepscope.common.json_values import to_text
from stepscope.common.stack_phases import BACKWARD, frame_phase, stack_phase
from stepscope.gpu.process_memory import OTHERS, OWN, OWN_NOT_LISTED, shares
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import nvml_uuid, open_source
from stepscope.host.usage import children_memory, container, kills_since
from stepscope.memory import allocator
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord

MAX_MESSAGE_CHARS = 1500
MAX_TEXT_CHARS = 300
MAX_NAME_CHARS = 80
MAX_FRAMES = 40  # Maximum number of frames in a record, the innermost.
MAX_DEPTH = 400  # Maximum number of frames that are read.
MAX_BYTES = 2**62  # Maximum size that is read from a message.
COUNTERS = ("allocated", "reserved", "peak_allocated")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_REQUEST = re.compile(r"[Tt]ried to allocate ([0-9]{1,20}(?:\.[0-9]+)?) (bytes|[KMGT]iB)")
_PACKAGE = f"{Path(__file__).resolve().parents[2].as_posix()}/"


def add_allocation(
    record: OomRecord,
    device: int,
    requested: int,
    allowed: int,
    free: int,
) -> None:
    """Add the state at an allocation that fails now; sizes in bytes."""
    record.device = device
    record.requested = int(requested)
    record.allowed = int(allowed)
    record.free = int(free)
    stack_of_call = _frames(sys._getframe(1))
    _read_values(
        record,
        {
            "counters": lambda: _read_counters(record, device),
            "device": lambda: _read_device(record, device),
            "settings": lambda: _read_settings(record),
            "stack": lambda: read_stack(record, stack_of_call),
            "processes": lambda: _read_processes(record),
        },
    )


def add_error(
    record: OomRecord,
    error: BaseException,
    memory: MemoryKind,
    first_kills: Any,
) -> None:
    """Add the state after a failure from its exception: the stack has unwound since.

    `first_kills` is the kernel's kill counter at the start, as in run.json.
    """
    record.memory = memory
    record.message = to_text(error)[:MAX_MESSAGE_CHARS]
    record.requested = requested_bytes(record.message)
    readers = {"stack": lambda: read_traceback(record, error.__traceback__)}
    if memory is not MemoryKind.GPU:
        readers["host"] = lambda: _read_host(record, first_kills)
    _read_values(record, readers)


def requested_bytes(message: str) -> int | None:
    """Return the requested size in torch's message; None without one.

    >>> requested_bytes("CUDA out of memory. Tried to allocate 2.00 GiB.")
    2147483648
    """
    match = _REQUEST.search(message)
    return None if match is None else min(int(float(match[1]) * _UNITS[match[2]]), MAX_BYTES)


def count_handled(error: BaseException | None) -> int:
    """Return the failed allocations among a handled exception and those handled before it."""
    found = 0
    while error is not None:
        found += type(error).__name__ == "OutOfMemoryError"
        error = error.__context__
    return found


def _read_values(record: OomRecord, readers: Mapping[str, Callable[[], None]]) -> None:
    failed = []
    for name, read in readers.items():
        try:
            read()
        except Exception as error:  # noqa: BLE001 - of torch, NVML or the script's own objects
            failed.append(f"{name}: {type(error).__name__}: {to_text(error)[:100]}")
    record.incomplete = "; ".join(failed) or None


def _read_counters(record: OomRecord, device: int) -> None:
    counters = allocator.read(device)
    for name in COUNTERS:
        value = counters.get(f"memory/{name}")
        setattr(record, name, None if value is None else int(value))


def _read_device(record: OomRecord, device: int) -> None:
    found = sys.modules["torch"].cuda.get_device_properties(device)
    record.total = int(found.total_memory)
    record.uuid = nvml_uuid(str(found.uuid), found.name)


def _read_settings(record: OomRecord) -> None:
    record.allocator = to_text(allocator.settings_in_force())[:MAX_TEXT_CHARS]


def _read_processes(record: OomRecord) -> None:
    if record.uuid is None:
        return
    source = open_source(reader="out of memory")
    processes = source.processes(record.uuid)
    if processes is None:
        reason = source.reason or source.lost(record.uuid)
        reason = reason or source.reasons(record.uuid).get("processes")
        record.others_reason = reason or OWN_NOT_LISTED
    else:
        add_processes(record, processes, os.getpid())


def add_processes(record: OomRecord, processes: Sequence[GpuProcess], own_pid: int) -> None:
    """Add the memory of all other processes; a reason if the list is incomplete."""
    used = None
    if record.total is not None and record.free is not None:
        used = record.total - record.free
    _, others, reasons = shares(processes, own_pid, used=used, total=record.total)
    if own_pid not in [process.pid for process in processes]:
        record.others_reason = reasons[OWN]
        return
    record.others = others
    record.others_reason = reasons.get(OTHERS)
    # 1 is the init process, or the container's own.
    listed = [process for process in processes if process.pid not in (0, 1, own_pid)]
    if listed:
        record.holders = _holders(listed)


def _holders(processes: Sequence[GpuProcess]) -> str:
    """Return processes as the subject of a sentence: the largest, and the number of all others."""
    largest = max(processes, key=lambda process: process.memory or 0)
    name = "" if largest.state == "gone" else to_text(largest.name)[:MAX_NAME_CHARS]
    shown = f"Process {largest.pid} ({name})" if name else f"Process {largest.pid}"
    return shown if len(processes) == 1 else f"{shown} and {len(processes) - 1} more"


def _read_host(record: OomRecord, first_kills: Any) -> None:
    memory = psutil.virtual_memory()
    cgroup = container()
    record.host = HostMemory(
        total=int(memory.total) if cgroup.limit is None else min(int(memory.total), cgroup.limit),
        available=cgroup.within(int(memory.available)),
        process=int(psutil.Process().memory_info().rss),
        children=children_memory(),
        kills=kills_since(first_kills),
    )


def read_stack(record: OomRecord, frames: Sequence[FrameType]) -> None:
    """Add stack and phase from the frames of the calling thread, the innermost first.

    In a thread of autograd the stack continues with the thread that waits in `backward()`.
    """
    if _is_python_thread():
        _add_frames(record, frames)
    else:
        _add_frames(record, [*frames, *_waiting_in_backward()])
        record.phase = BACKWARD


def read_traceback(record: OomRecord, trace: TracebackType | None) -> None:
    """Add stack and phase of the origin of an exception."""
    frames = [frame for frame, _ in islice(traceback.walk_tb(trace), MAX_DEPTH)]
    _add_frames(record, frames[::-1])


def _add_frames(record: OomRecord, frames: Sequence[FrameType]) -> None:
    # Without frames of this package, and of Python's start of a program.
    shown = [frame for frame in frames if not _file(frame).startswith((_PACKAGE, "<frozen "))]
    record.phase = stack_phase((_file(one), one.f_code.co_name) for one in shown)
    record.stack = tuple(
        to_text(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")[
            -MAX_TEXT_CHARS:
        ]
        for frame in shown[:MAX_FRAMES]
    )


def _frames(frame: FrameType) -> list[FrameType]:
    return [outer for outer, _ in islice(traceback.walk_stack(frame), MAX_DEPTH)]


def _is_python_thread() -> bool:
    """Return True if Python started this thread: those of autograd start in C++."""
    own = [thread for thread in threading.enumerate() if thread.ident == threading.get_ident()]
    return any(not isinstance(thread, threading._DummyThread) for thread in own)


def _waiting_in_backward() -> list[FrameType]:
    """Return the stack of another thread that waits in `backward()`; [] without one."""
    for thread, frame in sys._current_frames().items():
        frames = _frames(frame)
        phases = [frame_phase(_file(one), one.f_code.co_name) for one in frames]
        if thread != threading.get_ident() and BACKWARD in phases:
            return frames
    return []


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")
