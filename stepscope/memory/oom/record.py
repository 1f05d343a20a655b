"""The record `oom.json` of a failed allocation, and the figures in torch's message.

The file is written before the error unwinds (`observer.py`). A file is untrusted: a malformed one
is rejected with the name of the invalid field.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from stepscope.common.json_values import parsed

SCHEMA = 1
MIN_PID = 2  # Minimum pid of a listed process: 1 is the init process or the container's own.
MAX_FILE_BYTES = 4 * 2**20  # Maximum size of a file: Stepscope's have at most some 100 KB.
MAX_MESSAGE_CHARS = 4000


class MemoryKind(StrEnum):
    """Which memory was too small."""

    GPU = "gpu"
    HOST = "host"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Another process that holds memory of the device; `memory` in bytes, None if hidden."""

    pid: Annotated[int, msgspec.Meta(ge=MIN_PID)]
    name: str = ""
    memory: int | None = None
    yours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OomAllocationSite:
    """Live allocations of one stack: `size` is the bytes of all `count` allocations."""

    size: int
    count: int = 1
    frames: tuple[str, ...] = ()
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStats:
    """Free blocks in torch's segments; bytes.

    `largest_free` is the largest free block that this allocation may use, `elsewhere` the largest
    that belongs to another stream or to a private pool. `private` is the free memory of all private
    pools (those of CUDA graphs).
    """

    count: int
    largest_free: int
    elsewhere: int = 0
    private: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The optimizer that was stepping; bytes. `expected` is its complete state."""

    name: str
    parameters: int
    state: int
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The allocator's settings in force.

    `fraction` is the maximum fraction of the device for this process, None if unset or unknown.
    `text` is the environment variable.
    """

    backend: str = "native"
    text: str = ""
    expandable_segments: bool | None = None
    fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the host and of this process with its children; bytes.

    `limit` and `limit_used` are those of the cgroup (a container's). `kills` counts the cgroup's
    processes that the kernel has killed for lack of memory since the run began, None if unknown.
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
    """Samples of the last seconds, one column per metric; row i was taken after `steps[i]`."""

    ts: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    columns: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecord:
    """One failed allocation; None is an unavailable value.

    Bytes: `requested` as the allocator rounds it; `allowed` is the maximum for this process of the
    device's `total`, `free` the driver's free memory; then the allocator's counters; `own` is the
    memory of this process by the driver, `others` that of all other processes.

    `step` is the last completed optimizer step and `steps_done` the number completed in this run.
    `phase` is the part of the step, `training` the mode of the outermost model,
    `training_at_steps` its mode when steps ended, `grad` whether gradients were on. `inputs` are
    the shapes of the model's inputs. `stack` has the innermost frame first.
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
    """The first and the last failed allocation of a process, and their number.

    `ended`: the last failure ended the run; otherwise the script caught it and continued.
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
    """Return the report in a file. Raises ValueError if it is malformed."""
    report: OomReport = parsed(OomReport, text, SCHEMA, "report")
    return report


_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FIGURES = {
    "requested": rf"[Tt]ried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed",
    "own": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "reserved": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_PROCESS = rf"Process ([0-9]{{1,10}}) has {_SIZE} memory in use"


def figures_in(text: str) -> dict[str, Any]:
    """Return the figures in the message of an OutOfMemoryError, by the fields of a record.

    Sizes are rounded to two decimals of their unit, and counters are those before the stack
    unwound.

    >>> figures_in("CUDA out of memory. Tried to allocate 2.00 GiB.")
    {'requested': 2147483648}
    """
    text = text[:MAX_MESSAGE_CHARS]
    matches = ((name, re.search(pattern, text)) for name, pattern in _FIGURES.items())
    figures: dict[str, Any] = {name: _bytes(*match.groups()) for name, match in matches if match}
    cached = figures.pop("reserved", None)
    if cached is not None and "allocated" in figures:
        figures["reserved"] = figures["allocated"] + cached
    processes = tuple(
        ProcessMemory(pid=int(pid), memory=_bytes(number, unit))
        for pid, number, unit in re.findall(_PROCESS, text)
    )
    return figures | ({"processes": processes} if processes else {})


def bytes_in(text: str) -> int | None:
    """Return the size in a message of the CPU's allocator; None without one."""
    match = re.search(r"tried to allocate ([0-9]{1,18}) bytes", text[:MAX_MESSAGE_CHARS])
    return int(match[1]) if match else figures_in(text).get("requested")


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
