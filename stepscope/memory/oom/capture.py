"""Build the record of a failed allocation, of GPU or host memory.

The record is built at the allocation itself, or else from its error. Each part is read separately:
if one fails, its fields are missing and the record has the reason. Reading allocates no GPU memory
and calls no CUDA function: counters and settings are those of torch's allocator. Of the stack only
local variables of torch's frames are read, never those of the script, and no frame is kept.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from stepscope.common.clock import clock
from stepscope.common.json_values import to_text
from stepscope.common.metrics import Stream
from stepscope.common.stack_phases import BACKWARD, FORWARD, frame_phase, stack_phase
from stepscope.gpu.process_memory import OTHERS, OWN, OWN_NOT_LISTED, shares
from stepscope.gpu.processes import GpuProcess
from stepscope.gpu.source import nvml_uuid, open_source
from stepscope.host.usage import container, kills_since, resident
from stepscope.memory import allocator
from stepscope.memory.model_states import instances_of, with_subclasses
from stepscope.memory.oom.record import (
    AllocatorSettings,
    HostMemory,
    MemoryKind,
    OomRecord,
    ProcessMemory,
    RecentSamples,
)
from stepscope.store.recorder import Recorder

MAX_ROWS = 300  # Maximum number of samples in a record, the newest.
MAX_MESSAGE_CHARS, MAX_TEXT_CHARS, MAX_NAME_CHARS = 1500, 300, 80
MAX_PROCESSES = 20
MAX_BYTES = 2**62  # Maximum size that is read from a message.
COUNTERS = ("allocated", "reserved", "peak_allocated")
METRICS = ("memory/allocated", "memory/peak_allocated")  # A verdict needs their samples.
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
    builder.read("stack", stack_here, run.own_parts)
    builder.read("processes", _holders, builder.fields)
    builder.read("samples", _samples, run)
    return builder.record()


def at_error(run: FailureContext, error: BaseException, memory: MemoryKind) -> OomRecord:
    """Return the record of a failure from its exception: the stack has unwound since."""
    message = to_text(error)[:MAX_MESSAGE_CHARS]
    builder = _RecordBuilder(run, memory=memory, message=message, requested=bytes_in(message))
    builder.read("stack", stack_of, error.__traceback__, run.own_parts)
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
    in_force = allocator.in_force()
    text = allocator.environment_text() or ",".join(f"{k}:{v}" for k, v in in_force.items())
    settings = AllocatorSettings(
        backend=str(sys.modules["torch"].cuda.memory.get_allocator_backend()),
        text=to_text(text)[:MAX_TEXT_CHARS],
        expandable_segments=allocator.expandable_segments(in_force),
    )
    return {"settings": settings}


def _holders(fields: Fields) -> Fields:
    """Return the GPU memory of all other processes, by the driver."""
    uuid = fields.get("uuid")
    if uuid is None:
        return {}
    source = open_source(reader="out of memory")
    processes = source.processes(uuid)
    if processes is None:
        reason = source.reason or source.lost(uuid) or source.reasons(uuid).get("processes")
        return {"others_reason": reason or OWN_NOT_LISTED}
    used, total = fields["total"] - fields["free"], fields["total"]
    return shared_out(processes, os.getpid(), used=used, total=total)


def shared_out(processes: Iterable[GpuProcess], own_pid: int, *, used: int, total: int) -> Fields:
    """Return the memory of all other processes; missing if the list is incomplete."""
    listed = sorted(processes, key=lambda process: -(process.memory or 0))
    _, others, reasons = shares(listed, own_pid, used=used, total=total)
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
    """Return the recorder's samples of the last seconds, by the loop's step."""
    ahead = max(0, run.step() - run.recorder.step)  # The recorder may be some steps behind.
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


MAX_FRAMES = 40  # Maximum number of frames in a record, the innermost.
MAX_DEPTH = 400  # Maximum number of frames that are read.
MAX_INPUTS = 8
_PACKAGE = f"{Path(__file__).resolve().parents[2].as_posix()}/"


def stack_here(own_parts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the stack fields of a record for the calling thread.

    In a thread of autograd the stack continues with the thread that waits in `backward()`. There
    autocast is unknown: its state is that of the thread, not of the forward pass.
    """
    frames = _frames(sys._getframe(1))
    if _is_python_thread():
        torch = sys.modules.get("torch")
        if torch is None:
            return _place(frames, own_parts)
        modes = {"grad": torch.is_grad_enabled(), "autocast": _is_in_autocast(torch)}
        return _place(frames, own_parts) | modes
    return _place([*frames, *_waiting_in_backward()], own_parts) | {"phase": BACKWARD}


def _is_in_autocast(torch: Any) -> bool:
    """Return True in `torch.autocast` for CUDA; torch itself returns False in a cast operator."""
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:  # the usual case: nothing is searched
        return False
    contexts = instances_of(with_subclasses("torch.amp.autocast_mode", "autocast"))
    return any(context._enabled and context.device == "cuda" for context in contexts)


def stack_of(
    trace: TracebackType | None, own_parts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the stack fields of a record for the origin of an exception."""
    frames = [frame for frame, _ in islice(traceback.walk_tb(trace), MAX_DEPTH)]
    return _place(frames[::-1], own_parts)


def _place(frames: Sequence[FrameType], own_parts: Mapping[str, str] | None) -> dict[str, Any]:
    # Without frames of this package, and of Python's start of a program.
    shown = [frame for frame in frames if not _file(frame).startswith((_PACKAGE, "<frozen "))]
    calls = [frame.f_locals for frame in shown if _frame_phase(frame) == FORWARD]
    training = getattr(calls[-1].get("self"), "training", None) if calls else None
    return {
        "phase": stack_phase(((_file(one), one.f_code.co_name) for one in shown), own_parts),
        "training": training if isinstance(training, bool) else None,
        "inputs": tuple(_shapes(calls[-1])) if calls else (),
        "stack": tuple(
            to_text(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")[-300:]
            for frame in shown[:MAX_FRAMES]
        ),
    }


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
        if thread != threading.get_ident() and any(_frame_phase(one) == BACKWARD for one in frames):
            return frames
    return []


def _frame_phase(frame: FrameType) -> str | None:
    return frame_phase(_file(frame), frame.f_code.co_name)


def _shapes(call: Mapping[str, Any]) -> Iterator[str]:
    """Yield the shapes of a module's input tensors, from the local variables of its call."""
    args, kwargs = call.get("args"), call.get("kwargs")
    values = list(args) if isinstance(args, tuple | list) else []
    values += kwargs.values() if isinstance(kwargs, dict) else ()
    for value in values[:MAX_INPUTS]:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):  # as torch.Size is
            yield " × ".join(str(int(length)) for length in shape) or "scalar"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")
