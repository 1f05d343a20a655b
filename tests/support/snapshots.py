"""Snapshots for tests: made ones, and a real one of torch 2.13 recorded on the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Json = dict[str, Any]

REAL = Path(__file__).parents[1] / "data" / "recorded" / "snapshot.pickle"
"""Three steps of a small network."""
ADDRESS = 0x7F0000000000


def frame(line: int, filename: str = "/me/net.py") -> Json:
    """Return a frame as torch lists it."""
    return {"filename": filename, "line": line, "name": "forward"}


def live_block(size: int, line: int = 7, **more: Any) -> Json:
    """Return a live block that one line has allocated."""
    return {
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": [frame(line)],
    } | more


def free_block(size: int) -> Json:
    """Return a free block."""
    return {"size": size, "requested_size": 0, "state": "inactive", "frames": []}


def segment(blocks: list[Json], address: int = ADDRESS, **more: Any) -> Json:
    """Return a segment of these blocks, with their addresses."""
    placed, place = [], address
    for block in blocks:
        placed.append({"address": place} | block)
        place += block["size"]
    return {
        "device": 0,
        "address": address,
        "total_size": place - address,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": placed,
    } | more


def snapshot(blocks: list[Json]) -> Json:
    """Return a snapshot of one segment with these blocks, without a history."""
    return {"segments": [segment(blocks)], "device_traces": []}
