"""The record `oom.json` of a failed allocation.

The file is written before the error unwinds (`observer.py`). A file is untrusted: a malformed one
is rejected with the name of the invalid field. Unknown fields are ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.common.files import read_regular_file
from stepscope.common.json_values import parsed
from stepscope.memory.growth import GrowthTrend

SCHEMA = 1
MAX_FILE_BYTES = 4 * 2**20  # Maximum size of a file: Stepscope's have at most some 100 KB.


class MemoryKind(StrEnum):
    """Which memory was too small."""

    GPU = "gpu"
    HOST = "host"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Another process that holds memory of the device; `memory` in bytes, None if hidden."""

    pid: int
    name: str = ""
    memory: int | None = None


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


@dataclass(slots=True, kw_only=True)
class OomRecord:
    """One failed allocation; None is an unavailable value.

    Bytes: `requested` as the allocator rounds it; `allowed` is the maximum for this process of the
    device's `total`, `free` the driver's free memory; then the allocator's counters, with the
    highest `peak_allocated` of the run; `others` is the memory of all other processes by the
    driver.

    `step` is the last completed optimizer step and `steps_done` the number completed in this run.
    `phase` is the part of the step. `allocator` has the allocator's settings in force, as in
    PYTORCH_ALLOC_CONF. `growth` is that of allocated memory up to then. `stack` has the innermost
    frame first. `incomplete` has the reasons why values are missing.
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
    processes: tuple[ProcessMemory, ...] = ()
    allocator: str = ""
    growth: GrowthTrend | None = None
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


def read_report(folder: Path, rank: int = 0) -> OomReport | None:
    """Return a rank's report; None without one. Raises ValueError and OSError."""
    path = folder / oom_name(rank)
    try:
        return parse(read_regular_file(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
