"""The record `oom.json` of a failed allocation, and the figures in torch's message.

The file is written before the error unwinds (`observer.py`). It may come from others: what has
another form than ours is refused, with the field that is wrong.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepscope.common.json_values import parsed

SCHEMA = 1
FIRST_PID = 2  # Least number of a process that is listed: 1 is the system's or the container's own.
BYTES_LIMIT = 4 * 2**20  # Size up to which a file is read; ours have some 100 KB at most.


class MemoryKind(StrEnum):
    """Which memory was too small."""

    GPU = "gpu"
    HOST = "host"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Another process that holds memory of the device; `memory` in bytes, None where hidden."""

    pid: int
    name: str = ""
    memory: int | None = None
    yours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OomAllocationSite:
    """Live allocations of one stack, added up: `size` is the bytes of all `count` of them."""

    size: int
    count: int = 1
    frames: tuple[str, ...] = ()
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStats:
    """What torch's segments say of the device; bytes.

    `largest_free` is the largest free block that this allocation may use, `elsewhere` the largest
    that belongs to another stream or to a private pool. `private` is what the private pools (those
    of CUDA graphs) keep without using it.
    """

    count: int
    largest_free: int
    elsewhere: int = 0
    private: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The optimizer that was stepping; bytes. `expected` is its whole state once it is there."""

    name: str
    parameters: int
    state: int
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The allocator's settings in force.

    `fraction` is the share of the device that this process may use, None if not set or not known.
    `text` is the environment variable.
    """

    backend: str = "native"
    text: str = ""
    expandable_segments: bool | None = None
    fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the host and of this process with its children; bytes.

    `limit` and `limit_used` are those of the cgroup (a container's). `kills` is how many processes
    of the cgroup the kernel has killed for lack of memory since the run began, None if not known.
    """

    total: int | None = None
    available: int | None = None
    process: int | None = None
    children: int | None = None
    limit: int | None = None
    limit_used: int | None = None
    kills: int | None = None
    shared_free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentSamples:
    """The samples of the last seconds, a column a metric; a row was taken after `steps[i]`."""

    ts: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    columns: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecord:
    """One failed allocation. None is what could not be read.

    Bytes: `requested` as the allocator rounds it; `allowed` is what this process may use of the
    device's `total`, `free` what the driver had left; then the allocator's counters; `own` is the
    memory of this process by the driver, `others` that of all other processes.

    `step` is the last optimizer step that ended and `steps_done` how many ended in this run.
    `phase` is the part of the step, `training` the mode of the outermost model,
    `training_at_steps` its mode when steps ended, `grad` whether gradients were on. `inputs` are
    the shapes of what the model was called with. `stack` has the innermost frame first.
    """

    ts: float
    memory: MemoryKind = MemoryKind.GPU
    step: int = 0
    epoch: int = 0
    steps_done: int | None = None
    phase: str | None = None
    training: bool | None = None
    training_at_steps: bool | None = None
    grad: bool | None = None
    device: int | None = None
    uuid: str | None = None
    requested: int | None = None
    total: int | None = None
    allowed: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    active: int | None = None
    inactive_split: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    retries: int | None = None
    ooms: int | None = None
    own: int | None = None
    others: int | None = None
    others_reason: str | None = None
    processes: tuple[ProcessMemory, ...] = ()
    segments: SegmentStats | None = None
    blocks: tuple[OomAllocationSite, ...] = ()
    blocks_reason: str | None = None
    optimizer: OptimizerMemory | None = None
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    host: HostMemory | None = None
    readings: RecentSamples = field(default_factory=RecentSamples)
    inputs: tuple[str, ...] = ()
    function: str | None = None
    stack: tuple[str, ...] = ()
    message: str | None = None
    incomplete: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """All that a process has seen: the first and the last failed allocation, and how many.

    `ended` says that the last one ended the run; otherwise the script caught it and went on.
    """

    first: OomRecord
    last: OomRecord
    seen: int = 1
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def oom_name(rank: int = 0) -> str:
    """Return the name of a rank's file in the run folder."""
    return "oom.json" if rank == 0 else f"oom-rank{rank}.json"


def parse(text: str | bytes) -> OomReport:
    """Return the report in a file. Raises ValueError for another content."""
    report: OomReport = parsed(OomReport, text, SCHEMA, "report")
    for name, record in (("first", report.first), ("last", report.last)):
        pid = min((holder.pid for holder in record.processes), default=FIRST_PID)
        if pid < FIRST_PID:
            raise ValueError(
                f"report.{name}.processes.pid: must be at least {FIRST_PID}, got {pid}"
            )
    return report


_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SENTENCES = {
    "requested": rf"[Tt]ried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed",
    "own": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "cached": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_PROCESS = re.compile(rf"Process ([0-9]{{1,10}}) has {_SIZE} memory in use")
_HOST = re.compile(r"tried to allocate ([0-9]{1,18}) bytes")
TEXT_LIMIT = 4000


def figures_in(text: str) -> dict[str, Any]:
    """Return the figures in the message of an OutOfMemoryError, by the fields of a record.

    Sizes are rounded to two decimals of their unit, and counters are those before the stack
    unwound.

    >>> figures_in("CUDA out of memory. Tried to allocate 2.00 GiB.")
    {'requested': 2147483648}
    """
    text = text[:TEXT_LIMIT]
    matches = {name: re.search(pattern, text) for name, pattern in _SENTENCES.items()}
    found: dict[str, Any] = {
        name: _bytes(*match.groups()) for name, match in matches.items() if match is not None
    }
    cached = found.pop("cached", None)
    if cached is not None and "allocated" in found:
        found["reserved"] = found["allocated"] + cached
    processes = [
        ProcessMemory(pid=int(pid), memory=_bytes(number, unit))
        for pid, number, unit in _PROCESS.findall(text)
    ]
    return found | ({"processes": tuple(processes)} if processes else {})


def bytes_in(text: str) -> int | None:
    """Return the size in a message of the CPU's allocator; None if it has none."""
    found = _HOST.search(text[:TEXT_LIMIT])
    return int(found.group(1)) if found else figures_in(text).get("requested")


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
