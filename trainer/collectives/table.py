"""Measured collectives as lines of a terminal; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.common.formatting import format_bytes, format_short_time
from stepscope.distributed.communication import rate_text

DISTURBED = 3
"""Slowest over fastest part of a result from which other work on the machine is the cause."""


def heading() -> str:
    """Return the names of the columns."""
    return f"{'operation':16s}{'size':>10s}{'time':>12s}{'algorithm':>14s}{'bus':>14s}"


def line(row: Mapping[str, Any]) -> str:
    """Return one result.

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
    """Return what the ranks ran on, what their link can do, and how many results mean little."""
    machine = document.get("machine") or {}
    link = machine.get("link")
    who = f"{document['ranks']} ranks by {document['backend']} on {machine.get('device', '?')}"
    speed = "" if link is None else f", {link['name']}: {rate_text(link['bytes_per_s'])} each way"
    return [f"{who}{speed}.", *_disturbed(document["rows"])]


def _disturbed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [row for row in rows if "reason" not in row]
    spreads = [spread for row in measured if (spread := spread_of(row)) is not None]
    number = sum(spread > DISTURBED for spread in spreads)
    if number == 0:
        return []
    return [
        f"Other work disturbed {number} of {len(measured)} results: their slowest part took "
        f"over {DISTURBED}× the fastest. Measure again on an idle machine."
    ]


def spread_of(row: Mapping[str, Any]) -> float | None:
    """Return a result's slowest part over its fastest; None where they are not known."""
    fastest, slowest = row.get("fastest_s"), row.get("slowest_s")
    return slowest / fastest if fastest and slowest else None
