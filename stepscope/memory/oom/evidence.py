"""Compute the figures of a failed allocation; pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.common.formatting import format_bytes
from stepscope.memory.oom.record import HostMemory, OomRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFigures:
    """The figures of a record that determine the cause; bytes.

    `limit` is the maximum that this process may use of the device, `available` the bytes that the
    driver can still allocate to it, `outside` the bytes in use outside this process's PyTorch
    memory.
    """

    requested: int
    limit: int
    available: int
    allocated: int
    reserved: int
    outside: int

    @property
    def missing(self) -> int:
        """Bytes requested beyond those available; not positive if there were enough."""
        return self.requested - self.available

    @property
    def cached(self) -> int:
        """Bytes reserved and not allocated, in pieces."""
        return self.reserved - self.allocated

    @property
    def demand(self) -> int:
        """Bytes allocated and requested."""
        return self.allocated + self.requested


def figures_of(record: OomRecord) -> OomFigures | None:
    """Return the figures of a record; None if one is missing or they contradict each other."""
    requested, free = record.requested, record.free
    allocated, reserved = record.allocated, record.reserved
    limit = record.allowed or record.total
    if requested is None or free is None or allocated is None or reserved is None or limit is None:
        return None
    if requested <= 0 or free < 0 or limit <= 0 or not 0 <= allocated <= reserved:
        return None
    total = record.total or limit
    return OomFigures(
        requested=requested,
        limit=limit,
        available=free if limit >= total else min(free, max(0, limit - reserved)),
        allocated=allocated,
        reserved=reserved,
        outside=max(0, total - free - reserved),
    )


def evidence_of(record: OomRecord, figures: OomFigures | None = None) -> dict[str, str]:
    """Return the figures behind a cause as text, by their label."""
    host = record.host or HostMemory()
    sizes = {
        "Requested": record.requested,
        "Allocated (tensors)": record.allocated,
        "Reserved but free (fragmented)": None if figures is None else figures.cached,
        "Free on the device": record.free,
        "Other processes": record.others,
        "Outside of PyTorch's memory": None if figures is None else figures.outside,
        "Limit of this process": record.allowed,
        "Device total": record.total,
        "Peak allocated so far": record.peak_allocated,
        "Host, available": host.available,
        "Host in all": host.total,
        "This process": host.process,
        "Its child processes": host.children,
        "Container, used": host.limit_used,
        "Container, limit": host.limit,
    }
    shown = {name: format_bytes(size) for name, size in sizes.items() if size is not None}
    if record.others is None and record.others_reason:
        shown["Other processes"] = f"unknown: {record.others_reason}"
    if record.growth is not None:
        rate = format_bytes(record.growth.bytes_per_step)
        shown["Growth of allocated"] = f"{rate} per step over {record.growth.steps:,} steps"
    if record.allocator:
        shown["Allocator settings"] = record.allocator
    return shown
