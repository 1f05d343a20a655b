"""Run folders as their process leaves them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stepscope.run import STALE_S, new_run_folder, process_identity, write_run_json
from stepscope.store import StoreWriter, store_name
from stepscope.store.blocks import Event
from tests.support.row_blocks import block_of_rows

Row = tuple[float, int, dict[str, float | None]]


def make_run(root: Path, name: str = "r", *, old: bool = False, **run_info: Any) -> Path:
    """Make the folder of a run that is live, or `old`: its last heartbeat is too long ago."""
    folder = new_run_folder(root, name)
    beat = time.time() - 2 * STALE_S if old else time.time()
    base = {"created": 1.0, "status": "running", "heartbeat": beat, **process_identity()}
    write_run_json(folder, base | run_info)
    if old:
        os.utime(folder / "run.json", (beat, beat))
    return folder


def append_rows(folder: Path, stream: str, source: str, rows: list[Row], rank: int = 0) -> None:
    """Append rows to a series of the store of a rank, which is made if missing."""
    path = folder / store_name(rank)
    writer = StoreWriter(path, reopen=path.exists())
    with writer.transaction():
        writer.append(stream, source, block_of_rows(rows))
    writer.close()


def make_store(folder: Path, rank: int = 0) -> None:
    """Two steps, of which the second brings a metric; two GPUs; one event with a hostile text."""
    first: list[Row] = [(10.5, 1, {"train/loss": 0.1}), (11.0, 2, {"train/loss": None})]
    append_rows(folder, "steps", "", first, rank)
    late: list[Row] = [(12.0, 3, {"train/loss": 0.3, "=cmd()": float("inf")})]
    append_rows(folder, "steps", "", late, rank)
    for uuid in ("GPU-a", "GPU-b"):
        append_rows(folder, "devices", uuid, [(10.0, 1, {"gpu/util": 50.0})], rank)
    writer = StoreWriter(folder / store_name(rank), reopen=True)
    data = {"after": float("inf"), "list": [1]}
    with writer.transaction():
        writer.add_event(Event(9.0, 0, 1, "mark", '=1+1,"\nü', data))
    writer.close()
