"""Measured collectives as lines of a terminal; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.diagnosis.communication import gigabytes
from stepscope.formatting import format_bytes


def heading() -> str:
    """Return the names of the columns."""
    return f"{'operation':16s}{'size':>10s}{'time':>12s}{'algorithm':>14s}{'bus':>14s}"


def line(row: Mapping[str, Any]) -> str:
    """Return one result.

    >>> line({"operation": "broadcast", "bytes": 2**20, "seconds": 1e-3, "algorithm": 1.0486e9,
    ...       "bus": 1.0486e9})
    'broadcast         1.00 MiB    1000.0 µs     1.05 GB/s     1.05 GB/s'
    """
    start = f"{row['operation']:16s}{format_bytes(row['bytes']):>10s}"
    if "reason" in row:
        return f"{start}  not measured: {row['reason']}"
    time = f"{1e6 * row['seconds']:.1f} µs"
    algorithm, bus = gigabytes(row["algorithm"]), gigabytes(row["bus"])
    return f"{start}{time:>12s}{algorithm:>14s}{bus:>14s}"


def closing(document: Mapping[str, Any]) -> list[str]:
    """Return what the ranks ran on and what their link can do."""
    machine = document.get("machine") or {}
    link = machine.get("link")
    who = f"{document['ranks']} ranks by {document['backend']} on {machine.get('device', '?')}"
    if link is None:
        return [f"{who}."]
    return [f"{who}, {link['name']}: {gigabytes(link['bytes_per_s'])} each way."]
