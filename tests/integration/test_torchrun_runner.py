"""Jobs of several ranks by real torchrun on gloo: start, and every kind of end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.run import RunInfo, RunStatus, read_run
from stepscope.store.writer import recover_ended
from tests.support.child_process import ROOT
from tests.support.run_values import block_of
from tests.support.waiting import wait_until
from trainer import runners
from trainer.config import Optimizer, RunConfig, Runner, Strategy, Workload, defaults
from trainer.runners.child_process import SHUT_DOWN, TorchrunRun
from trainer.runners.rank_worker import LAUNCHER_GONE, SIGNALED

pytestmark = pytest.mark.timeout(240)


def config(**changes: Any) -> RunConfig:
    base = replace(defaults(Workload.LINEAR), optimizer=Optimizer.ADAM, epochs=100_000)
    several = replace(base, strategy=Strategy.DDP, runner=Runner.TORCHRUN, devices_per_node=2)
    return replace(several, **changes)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail a test that leaves a torchrun or a rank behind."""
    yield
    here = psutil.Process().children(recursive=True)
    assert [child for child in here if "rank_worker" in " ".join(child.cmdline())] == []


def start(tmp_path: Path, **changes: Any) -> TorchrunRun:
    run = runners.start(config(**changes), tmp_path)
    assert isinstance(run, TorchrunRun)
    return run


def step_of(folder: Path) -> int:
    return int(read_run(folder).run_json.get("step") or 0)


def steps(folder: Path, rank: int) -> list[int]:
    """Every step whose loss a rank has stored."""
    block = block_of(folder, rank=rank)
    recorded = block.count[block.keys.index("train/loss")] > 0
    return [int(step) for step in block.step[recorded]]


def pid(folder: Path, rank: int) -> int:
    name = "run.json" if rank == 0 else f"rank{rank}.json"
    return int(json.loads((folder / name).read_text())["pid"])


def wait_for_end(run: TorchrunRun, timeout_s: float = 120) -> RunInfo:
    wait_until(lambda: not run.alive(), timeout_s)
    return read_run(run.folder)


def test_each_rank_records_and_the_job_finishes(tmp_path: Path) -> None:
    run = start(tmp_path, max_steps=20)
    assert read_run(run.folder).status is RunStatus.PENDING
    ended = wait_for_end(run)
    assert ended.status is RunStatus.FINISHED, ended.reason
    assert steps(run.folder, 0) == steps(run.folder, 1) == list(range(1, 21))
    assert "RuntimeWarning" not in (run.folder / "worker.log").read_text()


def test_stop_ends_all_ranks(tmp_path: Path) -> None:
    run = start(tmp_path, num_workers=1)
    wait_until(lambda: step_of(run.folder) > 5, 90)
    assert run.stop(60)
    ended = wait_for_end(run)
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, SIGNALED)
    assert (run.folder / "last.pt").exists()


def test_ranks_that_do_not_stop_are_killed(tmp_path: Path) -> None:
    run = start(tmp_path)
    wait_until(lambda: step_of(run.folder) > 5, 90)
    for rank in (0, 1):
        os.kill(pid(run.folder, rank), signal.SIGSTOP)  # as a step that never ends
    assert not run.stop(0.5)
    run.end_with_server()
    ended = read_run(run.folder)
    assert ended.status is RunStatus.STOPPED
    assert SHUT_DOWN in str(ended.reason)
    recover_ended(ended)
    assert len(steps(run.folder, 0)) >= ended.run_json["step"]


def test_a_job_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = """
import sys, time, json
from pathlib import Path
from trainer import runners
from trainer.config import RunConfig
print(runners.start(RunConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])).folder)
sys.stdout.flush()
time.sleep(600)
"""
    command = [sys.executable, "-c", program, json.dumps(config().to_dict()), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().strip())
        wait_until(lambda: step_of(folder) > 5, 90)
        job = psutil.Process(server.pid).children(recursive=True)
        assert len(job) >= 3  # torchrun and two ranks
        server.kill()
    _, alive = psutil.wait_procs(job, 60)
    assert alive == []
    ended = read_run(folder)
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, LAUNCHER_GONE)


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    run = start(tmp_path, num_workers=1)
    wait_until(lambda: step_of(run.folder) > 5, 90)
    loading = psutil.Process(pid(run.folder, 1)).children(recursive=True)
    assert len(loading) >= 2  # the fork server and its worker
    os.kill(pid(run.folder, 1), signal.SIGKILL)
    ended = wait_for_end(run)
    assert psutil.wait_procs(loading, 20)[1] == []
    assert (ended.status, ended.cause_rank) == (RunStatus.CRASHED, 1)
    assert str(ended.reason).startswith("Rank 1 is gone without a message (killed")
