"""List the processes on a GPU, by NVML and, with this user's permissions, the OS."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil

from stepscope.gpu.nvml_device import NOT_BY_GPU, NvmlDevice, nvml_call

COMMAND_LIMIT = 200  # Maximum number of characters of a command.
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

ProcessKind = Literal["compute", "graphics"]
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
    kind: ProcessKind
    yours: bool
    state: ProcessState


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
    """Lists the processes on one GPU or MIG instance; an ended one keeps its name and command."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._graphics: list[Any] = []
        self._graphics_at = -math.inf
        self._known: dict[int, tuple[psutil.Process | None, GpuProcess]] = {}  # By pid.

    def read(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes by pid; None if the driver does not list them."""
        compute = self._device.query(_COMPUTE)
        if compute is None:
            return None
        now = self._device.library.clock()
        if now >= self._graphics_at + GRAPHICS_S:
            self._graphics_at = now
            self._graphics = self._device.query(_GRAPHICS) or []
        listed = {int(one.pid): self._describe(one, "graphics") for one in self._graphics}
        listed |= {int(one.pid): self._describe(one, "compute") for one in compute}
        self._known = listed
        return tuple(process for _, (_, process) in sorted(listed.items()))

    def reasons(self) -> dict[str, str]:
        """Return the reason for a missing list, after a query."""
        reason = self._device.reason(_COMPUTE)
        if reason is None:
            return {}
        return {"processes": NOT_LISTED if reason == NOT_BY_GPU else reason}

    def _describe(self, listed: Any, kind: ProcessKind) -> tuple[psutil.Process | None, GpuProcess]:
        """Return the OS's handle of a listed process, and what is known of the process."""
        pid = int(listed.pid)
        unknown = GpuProcess(
            pid=pid,
            name=f"process {pid}",
            command="",
            user="unknown",
            memory=None,
            kind=kind,
            yours=False,
            state="gone",
        )
        known, found = self._known.get(pid, (None, unknown))
        memory = None if listed.usedGpuMemory is None else int(listed.usedGpuMemory)
        found = replace(found, memory=memory, kind=kind, state="gone")
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                state: ProcessState = "zombie" if process.status() in ENDED else "running"
                if process == known:  # not another process that has got the same pid
                    return process, replace(found, state=state)
                name = process.name()
                command = _command(process) or name
                user = process.username()
                yours = process.uids().real == os.getuid()
        except psutil.Error:  # ended, or hidden from this user or container
            return known, found
        found = replace(found, name=name, command=command, user=user, yours=yours, state=state)
        return process, found
