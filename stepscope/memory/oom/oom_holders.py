"""Who holds memory of a GPU at this moment, asked of NVML as torch does for its own message.

The sampler's source belongs to the sampler's thread; NVML itself may be called from any.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import psutil
import pynvml

from stepscope.common.json_values import to_text
from stepscope.memory.oom.record import FIRST_PID, Holder

MOST = 20
NAME = 80
NOT_LISTED = "the driver does not list this process, as in some containers"
NO_MEMORY = "the driver does not give the memory of each process here"


@dataclass(frozen=True, slots=True)
class Holders:
    """Bytes of this process and of all others; `reason` says why they are not told apart."""

    own: int | None = None
    others: int | None = None
    processes: tuple[Holder, ...] = ()
    reason: str | None = None


def holders(uuid: str) -> Holders:
    """Return who holds a GPU's memory now. Raises nothing of NVML's."""
    try:
        _begin()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        listed = {
            int(one.pid): None if one.usedGpuMemory is None else int(one.usedGpuMemory)
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
    except (pynvml.NVMLError, AttributeError, OSError) as error:
        return Holders(reason=f"NVML: {to_text(error)[:NAME]}")
    return shared_out(listed, os.getpid())


@functools.cache
def _begin() -> None:
    """Initialize NVML, once a process: some drivers fail after repeated inits."""
    pynvml.nvmlInit()


def shared_out(listed: dict[int, int | None], own_pid: int) -> Holders:
    """Tell this process from the others, as far as the list allows it."""
    if own_pid not in listed:
        return Holders(reason=NOT_LISTED)
    rest = {pid: memory for pid, memory in listed.items() if pid != own_pid}
    ranked = sorted(rest, key=lambda pid: -(rest[pid] or 0))[:MOST]
    found = tuple(_holder(pid, rest[pid]) for pid in ranked if pid >= FIRST_PID)
    if any(memory is None for memory in rest.values()):
        return Holders(own=listed[own_pid], processes=found, reason=NO_MEMORY)
    others = sum(memory or 0 for memory in rest.values())
    return Holders(own=listed[own_pid], others=others, processes=found)


def _holder(pid: int, memory: int | None) -> Holder:
    try:
        process = psutil.Process(pid)
        name, yours = process.name(), process.uids().real == os.getuid()
    except psutil.Error:  # it has just ended, or another container or user hides it
        name, yours = "", False
    return Holder(pid=pid, name=to_text(name)[:NAME], memory=memory, yours=yours)
