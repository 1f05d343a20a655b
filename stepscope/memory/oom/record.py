"""The record `oom.json` of a failed allocation.

The file is written before the error unwinds (`observer.py`). A file is untrusted: a malformed one
is rejected with the name of the invalid field. Unknown fields are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from stepscope.common.files import read_json
from stepscope.memory.growth import GrowthTrend

MAX_FILE_BYTES = 2**20  # Maximum size of a file: Stepscope's have at most some 10 KB.


class MemoryKind(StrEnum):
    """Which memory was too small."""

    GPU = "gpu"
    HOST = "host"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the host, or of its container, and of this process with its children; bytes.

    `kills` counts the processes of the cgroup that the kernel has killed for lack of memory since
    the run began, None if unknown.
    """

    total: int | None = None
    available: int | None = None
    process: int | None = None
    children: int | None = None
    kills: int | None = None


@dataclass(slots=True, kw_only=True)
class OomRecord:
    """One failed allocation; None is an unavailable value.

    Bytes: `requested` as the allocator rounds it; `allowed` is the maximum for this process of the
    device's `total`, `free` the driver's free memory; then the allocator's counters, with the
    highest `peak_allocated` of the run; `others` is the memory of all other processes by the
    driver, and `holders` names them.

    `step` is the last completed optimizer step and `steps_done` the number completed in this run.
    `phase` is the part of the step. `allocator` has the allocator's settings in force, as in
    PYTORCH_ALLOC_CONF. `growth` is that of allocated memory over steps up to then, `batches` that
    over the batches since the last `backward()`. `retries` counts the failures that the script
    handles at that moment. `earlier` is the memory of optimizers that have not stepped since
    another was made, with their parameters. `trains_on` is the device that trains, in a job.
    `stack` has the innermost frame first. `incomplete` has the reasons why values are missing.
    """

    ts: float
    memory: MemoryKind = MemoryKind.GPU
    step: int = 0
    steps_done: int | None = None
    phase: str | None = None
    device: int | None = None
    uuid: str | None = None
    requested: int | None = None
    total: int | None = None
    allowed: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    others: int | None = None
    others_reason: str | None = None
    holders: str = "Another process"
    allocator: str = ""
    growth: GrowthTrend | None = None
    batches: GrowthTrend | None = None
    retries: int = 0
    earlier: int | None = None
    trains_on: int | None = None
    host: HostMemory | None = None
    stack: tuple[str, ...] = ()
    message: str | None = None
    incomplete: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """The last of `seen` failed allocations of a process; `ended`: it ended the run."""

    last: OomRecord
    seen: int = 1
    ended: bool = False


def oom_name(rank: int = 0) -> str:
    """Return the name of a rank's file in the run folder."""
    return "oom.json" if rank == 0 else f"oom-rank{rank}.json"


def read_report(folder: Path, rank: int = 0) -> OomReport | None:
    """Return a rank's report; None without one. Raises ValueError and OSError."""
    path = folder / oom_name(rank)
    try:
        return msgspec.convert(read_json(path, MAX_FILE_BYTES), OomReport)
    except FileNotFoundError:
        return None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path.name}: {error}") from error
