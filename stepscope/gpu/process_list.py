"""The processes on one GPU, asked of NVML and completed by what /proc says of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pynvml

from stepscope.gpu.asking import NOT_BY_GPU
from stepscope.gpu.nvml_device import Gpu
from stepscope.gpu.processes import GpuProcess, Processes, sm_shares

GRAPHICS_S = 10.0
"""Listing graphics processes takes milliseconds on some machines, and the list changes seldom."""
NOT_LISTED = "this driver lists no processes (as under WSL)"


class ProcessList:
    """Lists the processes on one GPU, which must have been found; not more than once a second."""

    def __init__(self, gpu: Gpu, names: Processes) -> None:
        self._gpu = gpu
        self._names = names
        self._graphics: list[Any] = []
        self._graphics_at = -math.inf
        self._stamp: int | None = None

    def read(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes by number; None where the driver does not list them."""
        gpu = self._gpu
        compute = gpu.ask(
            gpu.asking("processes", 2),
            (
                pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
                pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
            ),
        )
        if compute is None:
            return None
        listed = {int(one.pid): (one, False) for one in self._drawing()}
        listed |= {int(one.pid): (one, True) for one in compute}
        shares = self._shares(listed) if listed else {}
        return tuple(
            self._process(pid, one, is_compute, shares.get(pid))
            for pid, (one, is_compute) in sorted(listed.items())
        )

    def reasons(self) -> dict[str, str]:
        """Say why the list is missing, if it was asked for."""
        reason = self._gpu.asking("processes", 2).reason
        if reason is None:
            return {}
        return {"processes": NOT_LISTED if reason == NOT_BY_GPU else reason}

    def _drawing(self) -> list[Any]:
        """Return the graphics processes, at most ten seconds old."""
        gpu = self._gpu
        now = gpu.library.clock()
        if now >= self._graphics_at + GRAPHICS_S:
            self._graphics_at = now
            asking = gpu.asking("graphics processes")
            self._graphics = (
                gpu.ask(asking, (pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,)) or []
            )
        return self._graphics

    def _shares(self, pids: Collection[int]) -> dict[int, float]:
        """Return the shares since the last look; none at the first, which may return old ones."""
        gpu, since = self._gpu, self._stamp or 0
        samples = gpu.ask(
            gpu.asking("process utilization", 2),
            (
                lambda handle: pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, since),
                lambda handle: pynvml.nvmlDeviceGetProcessUtilization(handle, since),
            ),
        )
        if samples is None:
            return {}
        shares, stamp = sm_shares(samples, pids, since)
        first, self._stamp = self._stamp is None, stamp
        return {} if first else shares

    def _process(self, pid: int, one: Any, is_compute: bool, share: float | None) -> GpuProcess:
        person = self._names.look(pid)
        memory = one.usedGpuMemory
        return GpuProcess(
            pid=pid,
            name=person.name,
            command=person.command,
            user=person.user,
            memory=None if memory is None else int(memory),
            sm=share,
            kind="compute" if is_compute else "graphics",
            yours=person.yours,
            state=person.state,
        )
