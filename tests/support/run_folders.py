"""Run folders as their process leaves them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.run import STALE_S, new_run_folder, process_identity, rank_json, write_run_json
from stepscope.store import SeriesBlock, StoreWriter, store_name
from stepscope.store.blocks import RECORDED_NAN, Event
from tests.support.child_process import ROOT


def block_of_rows(rows: Sequence[tuple[float, int, Mapping[str, float | None]]]) -> SeriesBlock:
    """Return rows (time, step, values) as a block; an absent value, or None, is missing."""
    keys = tuple(dict.fromkeys(key for _, _, values in rows for key in values))
    table = np.full((len(keys), len(rows)), np.nan)
    for column, (_, _, values) in enumerate(rows):
        for line, key in enumerate(keys):
            value = values.get(key)
            if value is not None:
                table[line, column] = RECORDED_NAN if value != value else value
    ts = np.array([row[0] for row in rows], dtype=float)
    step = np.array([row[1] for row in rows], dtype=float)
    return SeriesBlock.raw(keys, ts, step, table)


VICTIM = """
import os, sys, time
from pathlib import Path
from stepscope.store.recorder import Recorder
from stepscope.run import RunStatus
recorder = Recorder(Path(sys.argv[1]), name="victim")
recorder.set_status(RunStatus.RUNNING)
step = 0
while True:
    step += 1
    recorder.log(step, {"train/loss": step / 2, "train/lr": 0.1})
    if step % 50 == 0:
        os.write(1, b"%d\\n" % step)
        time.sleep(0.001)  # a ring that is full before a late kill would drop rows
"""


def killed_run(folder: Path, lines: int = 400) -> int:
    """Kill a process that records 50 steps a millisecond; return the last step that it printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    told = [child.stdout.readline() for _ in range(lines)]
    child.send_signal(signal.SIGKILL)
    told += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    return int([line for line in told if line.endswith("\n")][-1])


GONE_PID = 2**22 + 1


class RankFolder:
    """A folder with the run_json of some of the ranks of a job; `base` is common to all."""

    def __init__(self, root: Path, **base: Any) -> None:
        self.folder = new_run_folder(root, "job")
        self.base = base

    def rank(self, number: int, status: str = "running", **more: Any) -> None:
        now = time.time()
        values = {"status": status, "heartbeat": now, "rank": number, **process_identity()}
        values |= self.base | more
        write_run_json(self.folder, values, rank_json(number))
        os.utime(self.folder / rank_json(number), (more.get("heartbeat", now),) * 2)


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
