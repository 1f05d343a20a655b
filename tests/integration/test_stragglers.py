"""A slow rank of a real torchrun job is named, by the command line and on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stepscope
from stepscope.distributed.stragglers.step_phases import ROWS, recent_times
from stepscope.run import run_folders
from stepscope.store import StoreReader
from tests.support.child_process import ROOT, run_python
from tests.support.jobs import diagnosed
from tests.support.recorded_runs import Row, write_run

SCRIPT = ROOT / "benchmarks" / "straggler_script.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def job(tmp_path: Path, *arguments: str) -> Path:
    """Run a watched job of two ranks; return its folder."""
    done = run_python(
        *(*TORCHRUN, "-m", "stepscope.watch", str(SCRIPT), *arguments),
        timeout_s=240,
        STEPSCOPE_RUNS=str(tmp_path),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert "will be missing" not in done.stderr
    (folder,) = run_folders(tmp_path)
    return folder


def test_a_rank_that_is_late_in_backward_is_named_from_the_command_line(tmp_path: Path) -> None:
    """Seen from outside, backward takes equally long on both ranks."""
    given = ("--phase", "backward", "--rank", "1", "--delay", "0.4", "--steps", "60")
    folder = job(tmp_path, *given)
    (found,) = diagnosed(folder, "straggler")
    assert (found["rank"], found["phase"]) == (1, "backward")
    assert 0.2 < found["share"] < 0.5
    assert "rank 1" in found["text"]
    assert found["next"]
    walls = [
        np.nanmedian(stepscope.open(folder, rank=rank).series("perf/backward").value[10:])
        for rank in (0, 1)
    ]
    assert walls[0] == pytest.approx(walls[1], rel=0.25)


def test_a_long_run_costs_no_more_than_a_short_one(tmp_path: Path) -> None:
    values = {"perf/step_time": 0.01, "perf/comm_wait": 0.001}
    rows: list[Row] = [(0.01 * i, i, values) for i in range(20 * ROWS)]
    folder = write_run(tmp_path / "long", {"world_size": 2}, steps=rows)
    with StoreReader(folder) as reader:
        times = recent_times(reader, 0, {"device": "cpu"})
    assert len(times.steps) < ROWS
    rare: list[Row] = [
        (0.001 * i, i, values if i % 128 == 0 else {"perf/step_time": 0.001})
        for i in range(20 * ROWS)
    ]
    folder = write_run(tmp_path / "rare", {"world_size": 2}, steps=rare)
    with StoreReader(folder) as reader:
        times = recent_times(reader, 0, {"device": "cpu"})
    assert 40 <= len(times.steps) <= 64
