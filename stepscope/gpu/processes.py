"""List the processes on a GPU, and attribute its memory to this process and to others.

Processes are listed by NVML and, with this user's permissions, the OS. In a container the driver
may not list all. Then the memory of others is missing, never 0.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil
import pynvml

from stepscope.gpu.nvml_device import NOT_BY_GPU, NvmlDevice

if TYPE_CHECKING:
    from stepscope.gpu.source import DeviceSource

COMMAND_LIMIT = 200  # Maximum number of characters of a command.

LOOK_AGAIN_S = 0.5  # Maximum age of cached process information.
MAX_CACHED = 1000
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

ProcessState = Literal["running", "zombie", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process with a context on a GPU; `memory` in bytes, None if the driver hides it.

    `sm` is the percentage of the SM time since the last reading. `yours`: of this process's user. A
    process that is `gone` has ended, or is hidden by another container or user.
    """

    pid: int
    name: str
    command: str
    user: str
    memory: int | None
    sm: float | None
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
    """Caches process information by pid for half a second; an ended process keeps its name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[float, ProcessInfo]] = {}

    def look(self, pid: int) -> ProcessInfo:
        """Return the information on a process, at most LOOK_AGAIN_S old."""
        now = self._clock()
        looked_at, known = self._known.get(pid, (-math.inf, None))
        if known is not None and now - looked_at < LOOK_AGAIN_S:
            return known
        if len(self._known) >= MAX_CACHED:
            self._known.clear()
        info = _query(pid, known)
        self._known[pid] = now, info
        return info


def _query(pid: int, known: ProcessInfo | None) -> ProcessInfo:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            born, ended = process.create_time(), process.status() in ENDED
            # The command of a starting process is empty, so it is read again.
            if known is None or known.born != born or known.command == known.name:
                name, yours = process.name(), process.uids().real == os.getuid()
                known = ProcessInfo(
                    name, _command(process) or name, process.username(), yours, "running", born
                )
    except psutil.Error:  # ended, or hidden from this user or container
        return replace(known, state="gone") if known is not None else ProcessInfo(f"process {pid}")
    return replace(known, state="zombie" if ended else "running")


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()[:COMMAND_LIMIT]
    return ""


def program_of(command: str) -> str:
    """Return a command without arguments, which may hold secrets; Python with its script.

    >>> program_of("/opt/bin/python3 -u train.py --token abc")
    'python3 train.py'
    >>> program_of("python -m torch.distributed.run train.py")
    'python -m torch.distributed.run'
    """
    path, *words = command.split() or [""]
    program = os.path.basename(path)
    if not program.startswith("python"):
        return program
    words = list(itertools.dropwhile(_PLAIN_FLAGS.__contains__, words))
    if words[:1] == ["-m"]:
        return " ".join((program, *words[:2]))
    # Another option may have a value, which is not the script.
    is_script = bool(words) and not words[0].startswith("-")
    return f"{program} {os.path.basename(words[0])}" if is_script else program


_PLAIN_FLAGS = {"-u", "-B", "-E", "-I", "-O", "-P", "-s", "-S"}  # Options of Python without value.


def sm_shares(
    samples: Iterable[Any], pids: Collection[int], last_seen: int
) -> tuple[dict[int, float], int]:
    """Return the newest SM utilization (%) by pid, and the newest time stamp (us).

    Omits values above 100%, old entries and unknown processes, which some drivers return. A process
    without an entry in a fresh response has 0%.
    """
    newest: dict[int, tuple[int, float]] = {}
    stamp, fresh = last_seen, False
    for sample in samples:
        pid, at, share = int(sample.pid), int(sample.timeStamp), float(sample.smUtil)
        if at <= last_seen or share > 100:
            continue
        stamp, fresh = max(stamp, at), True
        if pid in pids and at >= newest.get(pid, (0, 0.0))[0]:
            newest[pid] = at, share
    if not fresh:
        return {}, stamp
    return {pid: newest.get(pid, (0, 0.0))[1] for pid in pids}, stamp


GRAPHICS_S, SM_S = 10.0, 5.0
"""Periods of the queries for graphics processes and utilization, which take milliseconds on some
machines (docs/gpu/h100.md)."""
NOT_LISTED = "this driver lists no processes"


class GpuProcessList:
    """Lists the processes on one GPU, whose handle must have been acquired."""

    def __init__(self, gpu: NvmlDevice, names: ProcessInfoCache) -> None:
        self._gpu = gpu
        self._names = names
        self._graphics: list[Any] = []
        self._stamp: int | None = None
        self._sm: dict[int, float] = {}

    def read(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes by pid; None if the driver does not list them."""
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
        listed = {int(one.pid): (one, False) for one in self._graphics_processes()}
        listed |= {int(one.pid): (one, True) for one in compute}
        shares = self._shares(listed) if listed else {}
        return tuple(
            self._process(pid, one, is_compute, shares.get(pid))
            for pid, (one, is_compute) in sorted(listed.items())
        )

    def reasons(self) -> dict[str, str]:
        """Return the reason for a missing list, after a query."""
        reason = self._gpu.asking("processes", 2).reason
        if reason is None:
            return {}
        return {"processes": NOT_LISTED if reason == NOT_BY_GPU else reason}

    def _graphics_processes(self) -> list[Any]:
        """Return the graphics processes, at most GRAPHICS_S old."""
        asking = self._gpu.asking("graphics processes", rest_s=GRAPHICS_S)
        found = self._gpu.ask(asking, (pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,))
        if found is not None or asking.reason is not None:
            self._graphics = found or []
        return self._graphics

    def _shares(self, pids: Collection[int]) -> dict[int, float]:
        """Return the SM utilization (%), at most SM_S old; {} at the first call."""
        gpu, since = self._gpu, self._stamp or 0
        asking = gpu.asking("process utilization", 2, SM_S)
        samples = gpu.ask(
            asking,
            (
                lambda handle: pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, since),
                lambda handle: pynvml.nvmlDeviceGetProcessUtilization(handle, since),
            ),
        )
        if samples is not None:
            shares, stamp = sm_shares(samples, pids, since)
            self._sm = {} if self._stamp is None else shares
            self._stamp = stamp
        elif asking.reason is not None:
            self._sm = {}
        return self._sm

    def _process(self, pid: int, one: Any, is_compute: bool, share: float | None) -> GpuProcess:
        info = asdict(self._names.look(pid))
        del info["born"]
        memory = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
        kind: Literal["compute", "graphics"] = "compute" if is_compute else "graphics"
        return GpuProcess(pid=pid, memory=memory, sm=share, kind=kind, **info)


OTHERS, OWN = "gpu/mem_others", "memory/process_used"
DESCRIBED_S = 5.0  # Minimum interval between two lists of processes in run.json.
MOVED = 256 * 2**20  # Minimum change (bytes) of a process's memory that updates the list.
UNLISTED_SHARE, UNLISTED_BYTES = 0.02, 256 * 2**20  # Maximum memory of the driver itself.

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
        unlisted = max(UNLISTED_BYTES, UNLISTED_SHARE * (total or 0))
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
        self._described: dict[str, list[tuple[Any, ...]]] = {}
        self._describe_at = 0.0

    def look(self, uuid: str, values: Mapping[str, float]) -> dict[str, float]:
        """Query the processes of a GPU with these values; return the metrics derived from them."""
        processes = self._source.processes(uuid)
        if processes is None:
            self._lists.pop(uuid, None)
            hidden = self._source.reasons(uuid).get("processes", "no data")
            self._reasons[uuid] = {OTHERS: hidden, OWN: hidden}
            return {}
        self._lists[uuid] = processes
        used, total = values.get("gpu/mem_used"), values.get("gpu/mem_total")
        own, others, reasons = shares(processes, os.getpid(), used=used, total=total)
        if uuid == self.training:
            self._own = None if own is None else float(own)
            if reasons.get(OWN) == OWN_NOT_LISTED:  # perhaps it is listed with the host's pid
                others, reasons = None, reasons | {OTHERS: OWN_NOT_LISTED}
        self._reasons[uuid] = reasons
        return {} if others is None else {OTHERS: float(others)}

    def take_own(self) -> dict[str, float]:
        """Return the memory of this process on the training GPU, once for each query."""
        own, self._own = self._own, None
        return {} if own is None else {OWN: own}

    def reasons(self, uuid: str) -> dict[str, str]:
        """Return the reasons for missing values of a GPU; OWN only for the training GPU."""
        reasons = self._reasons.get(uuid, {})
        return {key: text for key, text in reasons.items() if key != OWN or uuid == self.training}

    def changed(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return `gpu_processes` of run.json after a change, at most every 5 s."""
        now = self._clock()
        keys = {uuid: list(map(_change_key, found)) for uuid, found in self._lists.items()}
        if now < self._describe_at or keys == self._described:
            return None
        self._described, self._describe_at = keys, now + DESCRIBED_S
        return {uuid: list(map(_entry, found)) for uuid, found in self._lists.items()}


def _change_key(process: GpuProcess) -> tuple[Any, ...]:
    """Return a key that differs after a change to record, which excludes small memory changes."""
    memory = None if process.memory is None else process.memory // MOVED
    return process.pid, process.name, process.state, memory


def _entry(process: GpuProcess) -> dict[str, Any]:
    """Return the entry in run.json, without arguments because the file may be shared."""
    keys = ("pid", "user", "name", "memory", "sm", "yours", "state")
    command = program_of(process.command) if process.yours else process.name
    return {key: getattr(process, key) for key in keys} | {"command": command}
