"""Measured collectives as lines of a terminal; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.common.formatting import format_bytes, format_short_time
from stepscope.distributed.communication import rate_text

DISTURBED = 3
"""Slowest over fastest round above which a result counts as disturbed by other work."""


def heading() -> str:
    """Return the column names."""
    return f"{'operation':16s}{'size':>10s}{'time':>12s}{'algorithm':>14s}{'bus':>14s}"


def line(row: Mapping[str, Any]) -> str:
    """Return one result as a line.

    >>> line({"operation": "broadcast", "bytes": 2**20, "seconds": 1e-3, "algorithm": 1.0486e9,
    ...       "bus": 1.0486e9})
    'broadcast         1.00 MiB     1.00 ms     1.05 GB/s     1.05 GB/s'
    """
    start = f"{row['operation']:16s}{format_bytes(row['bytes']):>10s}"
    if "reason" in row:
        return f"{start}  not measured: {row['reason']}"
    time = format_short_time(row["seconds"])
    algorithm, bus = rate_text(row["algorithm"]), rate_text(row["bus"])
    return f"{start}{time:>12s}{algorithm:>14s}{bus:>14s}"


def closing(document: Mapping[str, Any]) -> list[str]:
    """Return the ranks, the link's speed, and the number of disturbed results, as sentences."""
    machine = document.get("machine") or {}
    link = machine.get("link")
    who = f"{document['ranks']} ranks by {document['backend']} on {machine.get('device', '?')}"
    speed = "" if link is None else f", {link['name']}: {rate_text(link['bytes_per_s'])} each way"
    lines = [f"{who}{speed}."]
    measured = [row for row in document["rows"] if "reason" not in row]
    disturbed = sum((spread_of(row) or 0) > DISTURBED for row in measured)
    if disturbed:
        lines.append(
            f"Other work disturbed {disturbed} of {len(measured)} results: their slowest round "
            f"took more than {DISTURBED} times as long as the fastest. Measure again while the "
            "machine is idle."
        )
    return lines


def spread_of(row: Mapping[str, Any]) -> float | None:
    """Return a result's slowest round over its fastest; None if unknown."""
    fastest, slowest = row.get("fastest_s"), row.get("slowest_s")
    return slowest / fastest if fastest and slowest else None
