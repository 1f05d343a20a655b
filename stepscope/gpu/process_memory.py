"""Memory of a GPU held by this process and by others.

In a container the driver may not list all processes: then the memory of others is missing, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepscope.gpu.processes import GpuProcess, program_of
from stepscope.gpu.source import DeviceSource

OTHERS, OWN = "gpu/mem_others", "memory/process_used"
DESCRIBED_S = 5.0  # least time between two lists of processes in run.json
MOVED = 256 * 2**20  # bytes by which a process's memory has to change to be written again
UNLISTED_SHARE, UNLISTED_BYTES = 0.02, 256 * 2**20
"""Memory in use, beyond the processes listed, that the driver may take for itself."""

NOT_LISTED = "the driver does not list this process (in a container it may not)"
NO_MEMORY = "the driver does not give the memory of processes"
HIDDEN = "more memory is in use than that of the processes that the driver lists"


def shares(
    processes: Sequence[GpuProcess], pid: int, *, used: float | None, total: float | None
) -> tuple[int | None, int | None, dict[str, str]]:
    """Return the bytes of this process and of all others, and by metric why one is None.

    `used` and `total` are the device's, to detect memory that is not listed.
    """
    reasons: dict[str, str] = {}
    mine = next((one for one in processes if one.pid == pid), None)
    own = None if mine is None else mine.memory
    if own is None:
        reasons[OWN] = NOT_LISTED if mine is None else NO_MEMORY
    memories = [one.memory for one in processes]
    others = sum(memory for memory in memories if memory is not None) - (own or 0)
    if None in memories:
        reasons[OTHERS] = NO_MEMORY
    elif used is not None:
        unlisted = max(UNLISTED_BYTES, UNLISTED_SHARE * (total or 0))
        if used - others - (own or 0) > unlisted:
            reasons[OTHERS] = HIDDEN
    return own, None if OTHERS in reasons else others, reasons


class ProcessMemoryTracker:
    """Follows the processes on a run's GPUs: values once a second, and the list for run.json.

    `training` is the GPU whose share of this process is recorded; None while it is not known.
    """

    def __init__(self, source: DeviceSource, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self.training: str | None = None
        self._own: float | None = None
        self._reasons: dict[str, dict[str, str]] = {}
        self._lists: dict[str, tuple[GpuProcess, ...]] = {}
        self._described: dict[str, list[tuple[Any, ...]]] = {}
        self._describe_at = 0.0

    def look(self, uuid: str, values: Mapping[str, float]) -> dict[str, float]:
        """Ask for the processes of a GPU that has these values; return those that follow."""
        processes = self._source.processes(uuid)
        if processes is None:
            self._lists.pop(uuid, None)
            hidden = self._source.reasons(uuid).get("processes", "no data")
            self._reasons[uuid] = {OTHERS: hidden, OWN: hidden}
            return {}
        self._lists[uuid] = processes
        used, total = values.get("gpu/mem_used"), values.get("gpu/mem_total")
        own, others, self._reasons[uuid] = shares(processes, os.getpid(), used=used, total=total)
        if uuid == self.training:
            self._own = None if own is None else float(own)
        return {} if others is None else {OTHERS: float(others)}

    def take_own(self) -> dict[str, float]:
        """Return this process's memory on the training GPU, once for each look."""
        own, self._own = self._own, None
        return {} if own is None else {OWN: own}

    def reasons(self, uuid: str) -> dict[str, str]:
        """Return why values of a GPU are missing; of this process only where it trains."""
        found = self._reasons.get(uuid, {})
        return {key: why for key, why in found.items() if key != OWN or uuid == self.training}

    def changed(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return `gpu_processes` of run.json if it has changed, at most every 5 s."""
        now = self._clock()
        key = {uuid: [_key(one) for one in found] for uuid, found in self._lists.items()}
        if now < self._describe_at or key == self._described:
            return None
        self._described, self._describe_at = key, now + DESCRIBED_S
        return {uuid: [_entry(one) for one in found] for uuid, found in self._lists.items()}


def _key(process: GpuProcess) -> tuple[Any, ...]:
    """Return what makes a process worth writing again: not small changes of its memory."""
    memory = None if process.memory is None else process.memory // MOVED
    return process.pid, process.name, process.state, memory


def _entry(process: GpuProcess) -> dict[str, Any]:
    """Describe a process for run.json, which may be shared: without its arguments."""
    keys = ("pid", "user", "name", "memory", "sm", "yours", "state")
    command = program_of(process.command) if process.yours else process.name
    return {key: getattr(process, key) for key in keys} | {"command": command}
