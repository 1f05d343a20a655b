"""Memory of a GPU held by this process and by others.

In a container the driver may list only its own processes, or by numbers of the host. Then the
memory of others is missing with the reason, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.gpu.processes import GpuProcess, program_of
from stepscope.gpu.source import DeviceSource

OTHERS, OWN = "gpu/mem_others", "memory/process_used"
DESCRIBED_S = 5.0
"""Least time between two lists of processes in run.json."""
MOVED = 256 * 2**20
"""Bytes by which a process's memory has to change to be written again."""
UNLISTED_SHARE, UNLISTED_BYTES = 0.02, 256 * 2**20
"""Memory in use, beyond the processes listed, that the driver may take for itself."""

NOT_LISTED = "the driver does not list this process (in a container it may not)"
NO_MEMORY = "the driver does not give the memory of processes"
HIDDEN = "more memory is in use than that of the processes that the driver lists"


@dataclass(frozen=True, slots=True)
class ProcessMemorySplit:
    """Bytes of this process and of all others; where one is None, `reasons` has why, by metric."""

    own: int | None
    others: int | None
    reasons: Mapping[str, str]


def shares(
    processes: Sequence[GpuProcess], pid: int, *, used: float | None, total: float | None
) -> ProcessMemorySplit:
    """Divide the listed memory; `used` and `total` are the device's, to see what is not listed."""
    reasons: dict[str, str] = {}
    mine = next((one for one in processes if one.pid == pid), None)
    own = None if mine is None else mine.memory
    if own is None:
        reasons[OWN] = NOT_LISTED if mine is None else NO_MEMORY
    memories = [one.memory for one in processes]
    others = sum(memory for memory in memories if memory is not None) - (own or 0)
    if None in memories:
        reasons[OTHERS] = NO_MEMORY
    elif used is not None and used - others - (own or 0) > _unlisted(total):
        reasons[OTHERS] = HIDDEN
    return ProcessMemorySplit(own, None if OTHERS in reasons else others, reasons)


def _unlisted(total: float | None) -> float:
    return max(UNLISTED_BYTES, UNLISTED_SHARE * (total or 0))


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
        found = shares(
            processes,
            os.getpid(),
            used=values.get("gpu/mem_used"),
            total=values.get("gpu/mem_total"),
        )
        self._reasons[uuid] = dict(found.reasons)
        if uuid == self.training:
            self._own = None if found.own is None else float(found.own)
        return {} if found.others is None else {OTHERS: float(found.others)}

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
