"""The sweep of a server as a process: start, stop, resume, kill, and the end of the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dashboard.services import ServerActivity, Services
from dashboard.sweep_content import SweepStatus
from dashboard.sweeps import StoredSweep
from stepscope.lab.folder import TRIALS_FILE, SweepError
from stepscope.run import RunError, RunStatus, process_of, read_run
from stepscope.store.reader import send_command
from tests.support.waiting import wait_until
from trainer.config import Workload, defaults
from trainer.lab.plan import WorkloadPlan, make_variant

LONG = 100_000
TRIALS = 3  # of one round: to calibrate, the baseline, and one variant


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path / "runs", tmp_path / "examples")
    made.devices()
    yield made
    made.close()


def start(server: Services, rounds: int = 1) -> str:
    base = defaults(Workload.LINEAR)
    variant = make_variant({"optimizer_impl": "for-loop"}, base, server.devices().devices)
    plan = WorkloadPlan(
        config=base, variants=(variant,), steps=5, warmup=2, max_rounds=rounds, find_best=False
    )
    return server.begin(ServerActivity.SWEEP, lambda: server.sweeps.start(plan))


def resume(server: Services, sweep_id: str) -> None:
    server.begin(ServerActivity.SWEEP, lambda: server.sweeps.resume(sweep_id))


def samples(server: Services, sweep_id: str) -> int:
    path = server.sweeps.read(sweep_id).folder / TRIALS_FILE
    return len(path.read_text().splitlines()) if path.exists() else 0


def ended(server: Services, sweep_id: str) -> StoredSweep:
    wait_until(lambda: not server.sweeps.read(sweep_id).live, 100)
    return server.sweeps.read(sweep_id)


def test_a_sweep_runs_to_its_end_and_no_training_beside_it(server: Services) -> None:
    run = server.start(replace(defaults(Workload.LINEAR), epochs=LONG))
    wait_until(lambda: read_run(run).status is RunStatus.RUNNING)
    with pytest.raises(RunError, match=f"{run.name} is active"):
        start(server)
    assert server.sweeps.list_sweeps() == []
    send_command(run, "stop", {})
    wait_until(lambda: server.busy_reason(ServerActivity.SWEEP) is None)
    sweep_id = start(server)
    assert server.sweeps.active_id() == sweep_id
    with pytest.raises(RunError, match=f"The sweep {sweep_id} is measuring"):
        server.start(defaults(Workload.LINEAR))
    sweep = ended(server, sweep_id)
    assert sweep.content.status is SweepStatus.FINISHED, sweep.content.reason
    assert samples(server, sweep_id) == TRIALS
    assert server.sweeps.active_id() is None
    with pytest.raises(SweepError, match="has finished"):
        resume(server, sweep_id)


def test_a_stopped_or_killed_sweep_continues_where_it_was(server: Services) -> None:
    sweep_id = start(server)
    server.sweeps.stop(sweep_id)
    assert server.sweeps.read(sweep_id).content.status is SweepStatus.STOPPED
    assert samples(server, sweep_id) == 0
    resume(server, sweep_id)
    wait_until(lambda: samples(server, sweep_id) >= 1)
    os.kill(int(server.sweeps.read(sweep_id).json["pid"]), signal.SIGKILL)
    sweep = ended(server, sweep_id)
    assert sweep.content.status is SweepStatus.STOPPED
    assert "killed" in str(sweep.content.reason)
    assert server.sweeps.active_id() is None
    had = samples(server, sweep_id)
    resume(server, sweep_id)
    assert server.sweeps.read(sweep_id).live
    assert ended(server, sweep_id).content.status is SweepStatus.FINISHED
    # The trial of an incomplete round is repeated.
    assert server.sweeps.read(sweep_id).json["progress"]["done"] == TRIALS
    assert had < samples(server, sweep_id) <= TRIALS + had


def test_its_server_or_another_ends_a_sweep(server: Services, tmp_path: Path) -> None:
    sweep_id = start(server, rounds=50)
    wait_until(lambda: samples(server, sweep_id) >= 1)
    second = Services(tmp_path / "runs", tmp_path / "examples")
    second.devices()
    assert second.sweeps.active_id() == sweep_id
    with pytest.raises(SweepError, match="Stop"):
        second.sweeps.delete(sweep_id)
    second.sweeps.stop(sweep_id)
    assert ended(second, sweep_id).content.status is SweepStatus.STOPPED
    second.sweeps.delete(sweep_id)
    assert second.sweeps.list_sweeps() == []
    second.close()
    sweep_id = start(server, rounds=50)
    wait_until(lambda: samples(server, sweep_id) >= 1)
    process = process_of(server.sweeps.read(sweep_id).json)
    assert process is not None
    server.close()
    assert not process.is_running()
    assert server.sweeps.read(sweep_id).content.status is SweepStatus.STOPPED


def test_a_process_that_cannot_begin_leaves_its_last_words(server: Services) -> None:
    sweep_id = start(server)
    server.sweeps.stop(sweep_id)
    (server.sweeps.read(sweep_id).folder / "plan.json").write_text("{}")
    resume(server, sweep_id)
    assert "plan.json" in str(ended(server, sweep_id).content.reason)


@pytest.mark.parametrize("sweep_id", ["../runs", "absent", "", "a/b"])
def test_no_other_folder_is_read_or_deleted(server: Services, sweep_id: str) -> None:
    for action in (server.sweeps.read, server.sweeps.delete, server.sweeps.stop):
        with pytest.raises(SweepError, match="sweep: "):
            action(sweep_id)
