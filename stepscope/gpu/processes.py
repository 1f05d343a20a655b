"""List the processes on a GPU, by NVML and, with this user's permissions, the OS."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil

from stepscope.gpu.nvml_device import NOT_BY_GPU, NvmlDevice, nvml_call

COMMAND_LIMIT = 200  # Maximum number of characters of a command.

MAX_CACHED = 1000
MAX_AGE_S = 0.5  # Of cached information: a process may be on several GPUs.
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

ProcessState = Literal["running", "zombie", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process with a context on a GPU; `memory` in bytes, None if the driver hides it.

    `yours`: of this process's user. A process that is `gone` has ended, or is hidden by another
    container or user.
    """

    pid: int
    name: str
    command: str
    user: str
    memory: int | None
    kind: Literal["compute", "graphics"]
    yours: bool
    state: ProcessState


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Process information of the OS; `born` distinguishes two processes of one pid."""

    name: str
    command: str = ""
    user: str = "unknown"
    yours: bool = False
    state: ProcessState = "gone"
    born: float = 0.0


class ProcessInfoCache:
    """Reads process information by pid; an ended process keeps its name and command."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[float, ProcessInfo]] = {}

    def get(self, pid: int) -> ProcessInfo:
        """Return the information on a process, less than MAX_AGE_S old."""
        now = self._clock()
        read_at, info = self._known.get(pid, (-math.inf, None))
        if info is None or now >= read_at + MAX_AGE_S:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            info = _read(pid, info)
            self._known[pid] = now, info
        return info


def _read(pid: int, known: ProcessInfo | None) -> ProcessInfo:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            born = process.create_time()
            ended = process.status() in ENDED
            # The command of a starting process is empty, so it is read again.
            if known is None or known.born != born or known.command == known.name:
                name = process.name()
                known = ProcessInfo(
                    name=name,
                    command=_command(process) or name,
                    user=process.username(),
                    yours=process.uids().real == os.getuid(),
                    born=born,
                )
    except psutil.Error:  # ended, or hidden from this user or container
        return replace(known, state="gone") if known is not None else ProcessInfo(f"process {pid}")
    return replace(known, state="zombie" if ended else "running")


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()[:COMMAND_LIMIT]
    return ""


def program_of(command: str) -> str:
    """Return a command without arguments, which may hold secrets, but with a Python script.

    >>> program_of("/opt/bin/python3 -u train.py --token abc")
    'python3 train.py'
    """
    words = [os.path.basename(word) for word in command.split()]
    script = [word for word in words[1:] if word.endswith(".py")]
    return " ".join(words[:1] + script[:1])


_COMPUTE = (
    nvml_call("nvmlDeviceGetComputeRunningProcesses_v3"),
    nvml_call("nvmlDeviceGetComputeRunningProcesses_v2"),
)
_GRAPHICS = (nvml_call("nvmlDeviceGetGraphicsRunningProcesses_v3"),)
GRAPHICS_S = 10.0  # Period of the query for graphics processes: milliseconds on some machines.
NOT_LISTED = "this driver lists no processes"


class GpuProcessList:
    """Lists the processes on one GPU or MIG instance."""

    def __init__(self, device: NvmlDevice, names: ProcessInfoCache) -> None:
        self._device = device
        self._names = names
        self._graphics: list[Any] = []
        self._graphics_at = -math.inf

    def read(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes by pid; None if the driver does not list them."""
        compute = self._device.query(_COMPUTE)
        if compute is None:
            return None
        now = self._device.library.clock()
        if now >= self._graphics_at + GRAPHICS_S:
            self._graphics_at = now
            self._graphics = self._device.query(_GRAPHICS) or []
        listed = {int(one.pid): (one, False) for one in self._graphics}
        listed |= {int(one.pid): (one, True) for one in compute}
        return tuple(
            self._process(pid, one, is_compute) for pid, (one, is_compute) in sorted(listed.items())
        )

    def reasons(self) -> dict[str, str]:
        """Return the reason for a missing list, after a query."""
        reason = self._device.reason(_COMPUTE)
        if reason is None:
            return {}
        return {"processes": NOT_LISTED if reason == NOT_BY_GPU else reason}

    def _process(self, pid: int, one: Any, is_compute: bool) -> GpuProcess:
        info = self._names.get(pid)
        return GpuProcess(
            pid=pid,
            name=info.name,
            command=info.command,
            user=info.user,
            memory=None if one.usedGpuMemory is None else int(one.usedGpuMemory),
            kind="compute" if is_compute else "graphics",
            yours=info.yours,
            state=info.state,
        )
