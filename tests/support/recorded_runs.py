"""Run folders with rows that were recorded once, or made up: what `tests/data/recorded` holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.run import process_identity, write_run_json
from stepscope.store import STORE_NAME, StoreWriter, store_name
from tests.support.run_folders import block_of_rows

RECORDED = Path(__file__).parents[1] / "data" / "recorded"
CREATED = 1_700_000_000.0
Row = tuple[float, int, dict[str, float]]


def recorded_run(root: Path, name: str) -> Path:
    """Write the recorded run `name` into a folder."""
    told = json.loads((RECORDED / f"{name}.json").read_text())
    return write_run(root / name, told["run_json"], steps=told["steps"], samples=told["samples"])


def write_run(
    folder: Path,
    run_json: dict[str, Any] | None = None,
    *,
    rank: int = 0,
    gpu: str = "",
    gpus: Mapping[str, list[Row]] | None = None,
    **streams: list[Row],
) -> Path:
    """Write a run that has ended; `streams` are rows of seconds since the start, step, values.

    `gpus` are the rows of several GPUs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = {"created": CREATED, "status": "finished", "heartbeat": time.time(), "reason": None}
    if rank == 0:
        write_run_json(folder, base | process_identity() | (run_json or {}))
    writer = StoreWriter(folder / store_name(rank))
    with writer.transaction():
        sources = [(one, gpu * (one == "devices"), rows) for one, rows in streams.items()]
        sources += [("devices", one, rows) for one, rows in (gpus or {}).items()]
        for stream, source, rows in sources:
            moved = [(CREATED + seconds, step, values) for seconds, step, values in rows]
            writer.append(stream, source, block_of_rows(moved))
    writer.close()
    assert (folder / STORE_NAME).exists() or rank
    return folder


def write_slow_job(folder: Path, device: str) -> Path:
    """Write a job of two ranks on such devices, of which rank 1 is slow in forward."""
    for rank, (forward, wait) in enumerate(((0.02, 0.04), (0.05, 0.01))):
        values = {"perf/step_time": 0.1, "perf/data_wait": 0.01, "perf/forward": forward}
        values |= {"perf/forward_compute": forward, "perf/comm_wait": wait}
        steps = [(0.1 * i, i, {**values, "perf/ddp_iteration": float(i)}) for i in range(1, 80)]
        told = {"device": device, "world_size": 2, "rank": rank}
        write_run(folder, told, rank=rank, steps=steps)
        if rank:
            write_run_json(folder, told | process_identity(), f"rank{rank}.json")
    return folder


def rows(wait: float, count: int = 60) -> list[Row]:
    """Return steps of 0.1 s, each of which waits so long for its data."""
    values = {"perf/step_time": 0.1, "perf/data_wait": wait}
    return [(0.1 * i, i, values) for i in range(1, count)]
