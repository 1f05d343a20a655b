"""What torchrun gets, and what the page says if it starts no rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from stepscope.run import RunStatus, read_run
from tests.support.waiting import wait_until
from trainer.config import RunConfig, Runner, Strategy
from trainer.lessons import LESSONS
from trainer.runners.child_process import (
    ChildRun,
    TorchrunRun,
    threads_per_rank,
    torchrun_arguments,
    write_pending,
)

JOB = RunConfig(strategy=Strategy.DDP, runner=Runner.TORCHRUN, devices_per_node=4)


@pytest.mark.parametrize(("num_threads", "cores", "threads"), [(0, 64, 8), (0, 2, 1), (5, 2, 5)])
def test_ranks_share_half_of_the_cores(num_threads: int, cores: int, threads: int) -> None:
    assert threads_per_rank(replace(JOB, num_threads=num_threads), cores) == threads


ON_ONE_MACHINE = {
    "job": torchrun_arguments(JOB, Path("/runs/20260101-digits-mlp-0a")),
    # Without Python's own "-m torch.distributed.run".
    "lesson": next(lesson for lesson in LESSONS if lesson.ranks > 1).arguments[2:],
}


@pytest.mark.parametrize("arguments", ON_ONE_MACHINE.values(), ids=ON_ONE_MACHINE)
def test_ranks_of_one_machine_meet_without_its_name(arguments: list[str]) -> None:
    """Nothing may resolve the machine's name, as --standalone does; any free port will do."""
    config = config_from_args(parse_args(arguments))[0]
    assert (config.local_addr, config.rdzv_endpoint) == ("localhost", "localhost:0")
    assert (config.rdzv_backend, config.min_nodes, config.max_nodes) == ("c10d", 1, 1)
    assert config.nproc_per_node in (2, 4)


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("Traceback\n", "(exit code 3). worker.log has the error."),
        ("x.SignalException: Process 1 got signal: 15\n", "before the ranks had started"),
    ],
)
def test_ranks_that_did_not_start_have_the_reason(
    tmp_path: Path, printed: str, reason: str
) -> None:
    write_pending(tmp_path, JOB, "Starting.")
    job = TorchrunRun.__new__(TorchrunRun)
    ChildRun.__init__(job, tmp_path, ["-c", f"print({printed!r}, end=''); raise SystemExit(3)"])
    wait_until(lambda: not job.alive(), 60)
    ended = read_run(tmp_path)
    assert ended.status is RunStatus.FAILED
    assert reason in str(ended.reason)
