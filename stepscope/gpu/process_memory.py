"""Attribute the memory of a GPU to this process and to others.

In a container the driver may not list all processes. Then the memory of others is missing, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepscope.gpu.processes import GpuProcess, program_of
from stepscope.gpu.source import DeviceSource

OTHERS = "gpu/mem_others"
OWN = "memory/process_used"
DESCRIBED_S = 5.0  # Minimum interval between two lists of processes in run.json.
MAX_UNLISTED_SHARE = 0.02  # Maximum memory of the driver itself, of the total or in bytes.
MAX_UNLISTED_BYTES = 256 * 2**20

OWN_NOT_LISTED = "the driver does not list this process (in a container it may not)"
NO_MEMORY = "the driver does not report the memory of processes"
HIDDEN = "more memory is in use than that of the processes that the driver lists"


def shares(
    processes: Sequence[GpuProcess], pid: int, *, used: float | None, total: float | None
) -> tuple[int | None, int | None, dict[str, str]]:
    """Return the bytes of this process and of all others, and the reasons for None by metric.

    `used` and `total` (bytes of the device) reveal memory of processes that are not listed.
    """
    reasons: dict[str, str] = {}
    mine = next((one for one in processes if one.pid == pid), None)
    own = None if mine is None else mine.memory
    if own is None:
        reasons[OWN] = OWN_NOT_LISTED if mine is None else NO_MEMORY
    memories = [one.memory for one in processes]
    others = sum(memory for memory in memories if memory is not None) - (own or 0)
    if None in memories:
        reasons[OTHERS] = NO_MEMORY
    elif used is not None:
        unlisted = max(MAX_UNLISTED_BYTES, MAX_UNLISTED_SHARE * (total or 0))
        if used - others - (own or 0) > unlisted:
            reasons[OTHERS] = HIDDEN
    return own, None if OTHERS in reasons else others, reasons


class ProcessMemoryTracker:
    """Tracks the processes on a run's GPUs, once a second and for the list in run.json."""

    def __init__(self, source: DeviceSource, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self.training: str | None = None  # The GPU for which this process's memory is recorded.
        self._own: float | None = None
        self._reasons: dict[str, dict[str, str]] = {}
        self._lists: dict[str, tuple[GpuProcess, ...]] = {}
        self._described: dict[str, list[dict[str, Any]]] = {}
        self._describe_at = 0.0

    def update(self, uuid: str, values: Mapping[str, float]) -> dict[str, float]:
        """Query the processes of a GPU with these values; return the metrics derived from them."""
        processes = self._source.processes(uuid)
        own: int | None = None
        others: int | None = None
        if processes is None:
            self._lists.pop(uuid, None)
            hidden = self._source.reasons(uuid).get("processes", "no data")
            reasons = {OTHERS: hidden, OWN: hidden}
        else:
            self._lists[uuid] = processes
            used, total = values.get("gpu/mem_used"), values.get("gpu/mem_total")
            own, others, reasons = shares(processes, os.getpid(), used=used, total=total)
        if uuid != self.training:
            reasons.pop(OWN, None)
        else:
            self._own = None if own is None else float(own)
            if reasons.get(OWN) == OWN_NOT_LISTED:  # perhaps it is listed with the host's pid
                others = None
                reasons[OTHERS] = OWN_NOT_LISTED
        self._reasons[uuid] = reasons
        return {} if others is None else {OTHERS: float(others)}

    def take_own(self) -> dict[str, float]:
        """Return the memory of this process on the training GPU, once for each query."""
        own, self._own = self._own, None
        return {} if own is None else {OWN: own}

    def reasons(self, uuid: str) -> dict[str, str]:
        """Return the reasons for missing values of a GPU; OWN only for the training GPU."""
        return self._reasons.get(uuid, {})

    def changed(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return `gpu_processes` of run.json after a change, at most every 5 s."""
        now = self._clock()
        if now < self._describe_at:
            return None
        lists = {uuid: list(map(_entry, found)) for uuid, found in self._lists.items()}
        if lists == self._described:
            return None
        self._described = lists
        self._describe_at = now + DESCRIBED_S
        return lists


def _entry(process: GpuProcess) -> dict[str, Any]:
    """Return the entry in run.json, without arguments because the file may be shared."""
    keys = ("pid", "user", "name", "memory", "yours", "state")
    command = program_of(process.command) if process.yours else process.name
    return {key: getattr(process, key) for key in keys} | {"command": command}
