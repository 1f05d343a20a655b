"""Two gloo ranks by every launcher: one run, with losses, steps and memory of each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.run import RunStatus, read_run, run_folders
from stepscope.run.rank_status import ranks_of
from stepscope.store import StoreReader
from tests.support.server import free_port
from tests.support.watched_scripts import SCRIPTS

STEPS = 6
PYTHON = [sys.executable, "-m"]
WATCHED = ["-m", "stepscope.watch", "launched.py"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *WATCHED]
ACCELERATE = [*PYTHON, "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def begin(root: Path, command: list[str], **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=SCRIPTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "STEPSCOPE_RUNS": str(root), **environ},
    )


def ended(*processes: subprocess.Popen[bytes]) -> None:
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output.decode()
    finally:
        for process in processes:
            process.kill()


def the_run(root: Path) -> list[dict[str, Any]]:
    """Check that there is one run of two ranks with all that is recorded; return what they say."""
    [folder] = run_folders(root)
    assert read_run(folder).status is RunStatus.FINISHED
    assert [rank.status.value for rank in ranks_of(folder)] == ["finished"] * 2
    said = [json.loads((folder / name).read_text()) for name in ("run.json", "rank1.json")]
    assert [(rank["rank"], rank["world_size"]) for rank in said] == [(0, 2), (1, 2)]
    for number in (0, 1):
        with StoreReader(folder, number) as reader:
            found = {info.stream: info for info in reader.series()}
            steps, samples = found["steps"], found["samples"]
            rows = reader.read(steps.id, 0, steps.rows, 1)
            assert rows.step.tolist() == list(range(1, STEPS + 1))
            assert (rows.low[rows.keys.index("train/loss")] > 0).all()
            assert "process/rss" in reader.keys(samples.id)
    return said


def test_accelerates_launcher(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    port = ["--main_process_port", str(free_port())]
    ended(begin(tmp_path, [*ACCELERATE, *port, *WATCHED, "accelerate"]))
    the_run(tmp_path)


@pytest.mark.parametrize(
    ("package", "script"), [("transformers", "huggingface"), ("lightning", "lightning")]
)
def test_a_framework_under_torchrun(tmp_path: Path, package: str, script: str) -> None:
    pytest.importorskip(package)
    ended(begin(tmp_path, [*TORCHRUN, script]))
    the_run(tmp_path)


@pytest.mark.parametrize("how", ["spawn", "spawn-init"])
def test_processes_that_the_script_spawns(tmp_path: Path, how: str) -> None:
    """Spawned ranks in place of the script, and `init` in each of them."""
    watch = [sys.executable] if how == "spawn-init" else [*PYTHON, "stepscope.watch"]
    process = begin(tmp_path, [*watch, "launched.py", how, str(free_port())])
    ended(process)
    assert process.pid not in [rank["pid"] for rank in the_run(tmp_path)]


def test_the_ranks_that_lightning_starts(tmp_path: Path) -> None:
    """The script's own process is rank 0; each rank applies the settings of the command line."""
    pytest.importorskip("lightning")
    watch = [*PYTHON, "stepscope.watch", "--with", "num_workers=1"]
    process = begin(tmp_path, [*watch, "launched.py", "lightning"])
    ended(process)
    ranks = the_run(tmp_path)
    assert ranks[0]["pid"] == process.pid
    assert ranks[0]["local_world_size"] == 2
    assert [len(rank["settings"]) for rank in ranks] == [1, 1]
