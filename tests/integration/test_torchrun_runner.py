"""Jobs of several ranks by real torchrun on gloo: start, every kind of end, restarts, machines."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.recorder.recorder import CommandName
from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunInfo, RunStatus, read_run, write_run_json
from stepscope.store import StoreReader
from stepscope.store.reader import EVERY, send_command
from tests.support.recorded_runs import write_run
from tests.support.server import free_port
from tests.support.waiting import wait_until
from trainer import runners
from trainer.config import Optimizer, RunConfig, Runner, Strategy, Workload, defaults
from trainer.runners.child_process import SHUT_DOWN
from trainer.runners.rank_worker import SIGNALED
from trainer.runners.torchrun import (
    LaunchSpec,
    TorchrunRun,
    rank_variables,
    slurm_script,
)

ROOT = Path(__file__).resolve().parents[2]
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


# torchrun tells of one rank. Where rank 0 has failed over the killed one before torchrun looked,
# that is rank 0, and the exit code of rank 1 is not known.
KILLED = {
    -9: "Rank 1 was killed (SIGKILL).",
    None: "Rank 1 was killed, or exited without a message.",
}


def start(tmp_path: Path, **changes: Any) -> TorchrunRun:
    run = runners.start(config(**changes), tmp_path)
    assert isinstance(run, TorchrunRun)
    return run


def step_of(folder: Path) -> int:
    return int(read_run(folder).run_json.get("step") or 0)


def steps(folder: Path, rank: int) -> list[int]:
    """Every step whose loss a rank has stored."""
    with StoreReader(folder, rank) as reader:
        (info,) = [info for info in reader.series() if info.stream == "steps"]
        block = reader.read(info.id, 0, info.rows, 1)
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
    assert ended.run_json["torchrun"]["restarts"] == 0
    assert "RuntimeWarning" not in (run.folder / "worker.log").read_text()


def test_a_job_stopped_while_it_starts_reads_as_stopped(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert run.stop(60)
    assert read_run(run.folder).status is RunStatus.STOPPED


def test_stop_ends_all_ranks_and_restarts_none(tmp_path: Path) -> None:
    run = start(tmp_path, num_workers=1, max_restarts=1)
    wait_until(lambda: step_of(run.folder) > 5, 90)
    assert run.stop(60)
    ended = wait_for_end(run)
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, SIGNALED)
    assert "job_end" not in ended.run_json
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
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, SIGNALED)


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    run = start(tmp_path)
    wait_until(lambda: step_of(run.folder) > 5, 90)
    ranks = [psutil.Process(pid(run.folder, rank)) for rank in (0, 1)]
    os.kill(ranks[0].ppid(), signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, 60)
    assert alive == []
    ended = wait_for_end(run)
    assert (ended.status, "torchrun" in str(ended.reason)) == (RunStatus.STOPPED, True)


def test_a_killed_rank_restarts_all_and_nothing_is_lost(tmp_path: Path) -> None:
    run = start(tmp_path, max_steps=4000, max_restarts=2)
    first = run.folder
    wait_until(lambda: step_of(first) > 5, 90)
    send_command(first, CommandName.SAVE_CHECKPOINT, {})
    wait_until(lambda: bool(list(first.glob("step-*.pt"))), 60)
    os.kill(pid(first, 1), signal.SIGKILL)

    def restarted() -> bool:
        before = read_run(first).status.live
        # The page must not offer Start between the two attempts.
        assert run.folder != first or before or run.goes_on() or read_run(first).status.live
        return run.folder != first

    wait_until(restarted, 90)
    ended = wait_for_end(run)
    assert ended.folder.name == f"{first.name}-restart1"
    assert ended.status is RunStatus.FINISHED, ended.reason
    told = read_run(first)
    assert told.status is RunStatus.FAILED
    exit_code = ended.run_json["restart"]["exit_code"]
    assert told.reason == KILLED[exit_code]
    assert told.run_json["restarted_as"] == ended.id
    assert ended.run_json["restart_of"] == first.name
    (saved,) = first.glob("step-*.pt")
    resumed = int(saved.stem.removeprefix("step-"))
    known = {"number": 1, "of": 2, "rank": 1, "exit_code": exit_code, "step": resumed}
    assert ended.run_json["restart"] == known | {"cause": ended.run_json["restart"]["cause"]}
    with StoreReader(ended.folder) as reader:
        (event,) = [one for one in reader.events(limit=EVERY) if one.kind == "restart"]
    assert f"step {resumed:,}" in event.text
    recover_ended(told)
    for rank in (0, 1):
        before, after = steps(first, rank), steps(ended.folder, rank)
        assert before == list(range(1, len(before) + 1))
        # Rank 1 is killed once rank 0 has written the file, perhaps before its own row.
        assert len(before) >= resumed - rank
        assert after == list(range(resumed + 1, 4001))


def test_without_restarts_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    run = start(tmp_path, num_workers=1)
    wait_until(lambda: step_of(run.folder) > 5, 90)
    loading = psutil.Process(pid(run.folder, 1)).children(recursive=True)
    assert len(loading) >= 2  # the fork server and its worker
    os.kill(pid(run.folder, 1), signal.SIGKILL)
    ended = wait_for_end(run)
    assert psutil.wait_procs(loading, 20)[1] == []
    assert not run.goes_on()
    assert (ended.status, ended.cause_rank) == (RunStatus.FAILED, 1)
    assert ended.reason in KILLED.values()


def two_machines(folder: Path, job: RunConfig) -> list[subprocess.Popen[str]]:
    """Start two ranks, each alone on its machine; without torchrun, to be quick."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    place |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    command = [sys.executable, "-m", "trainer.runners.rank_worker", str(folder)]
    command += ["--config", json.dumps(job.to_dict())]
    return [
        subprocess.Popen(
            command, env=os.environ | place | {"RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]


def test_a_machine_without_rank_0_that_is_told_to_end_stops_all_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    ranks = two_machines(folder, config(devices_per_node=1, num_nodes=2))
    wait_until(lambda: (folder / "run.json").exists() and step_of(folder) > 5, 90)
    ranks[1].terminate()
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0]
    ended = read_run(folder)
    assert ended.status is RunStatus.STOPPED, ended.reason
    assert ended.reason == SIGNALED
    assert (folder / "last.pt").exists()


def test_a_finished_job_that_is_started_again_says_so_and_is_not_touched(tmp_path: Path) -> None:
    """As by Slurm's requeue."""
    folder = tmp_path / "job"
    done = {"created": 1.0, "heartbeat": 1.0, "status": "finished", "world_size": 2, "step": 40}
    for rank, name in enumerate(("run.json", "rank1.json")):
        write_run(folder, None, rank=rank)
        write_run_json(folder, done, name)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    ranks = two_machines(folder, RunConfig())
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [bool(text) for text in said] == [True, False]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert list(tmp_path.iterdir()) == [folder]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_nodes_of_a_slurm_script_make_one_job(tmp_path: Path) -> None:
    """Both nodes are this machine; srun starts its command once on each."""
    job = config(devices_per_node=1, num_nodes=2, max_steps=40)
    variables = rank_variables(job, 2)
    runs = tmp_path / "runs" / "job"
    asked = LaunchSpec(
        config=job, folder=runs, project=ROOT, port=free_port(), environment=variables
    )
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (
        ("scontrol", "printf 'localhost\\nlocalhost\\n'"),
        ("srun", '"$@" & one=$!; "$@" & two=$!; wait $one && wait $two'),
    ):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(stat.S_IRWXU)
    path = [str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    given = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "two"}
    given |= {"SLURM_CPUS_PER_TASK": "2", "PATH": os.pathsep.join(path)}
    command = ["bash", "-c", slurm_script(asked)]
    subprocess.run(command, env=os.environ | given, check=True, timeout=150)
    folder = runs.with_name(f"job-{os.getpid()}")
    ended = read_run(folder)
    assert ended.status is RunStatus.FINISHED, ended.reason
    assert ended.run_json["world_size"] == 2
    assert steps(folder, 0) == steps(folder, 1) == list(range(1, 41))
