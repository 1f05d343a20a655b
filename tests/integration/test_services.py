"""The server's one active run: its start after another, and its end with the server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dashboard import services
from dashboard.services import Services
from stepscope.run import RunError, RunStatus, process_identity, read_run, write_run_json
from stepscope.session import stop
from tests.support.run_values import metric
from tests.support.waiting import wait_until
from trainer.config import Optimizer, Workload, defaults
from trainer.runners import training_run
from trainer.runners.child_process import SHUT_DOWN, WORKER_LOG, ChildRun, TorchrunRun
from trainer.train import TrainStep

CONFIG = replace(defaults(Workload.LINEAR), epochs=1)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    monkeypatch.setattr(services, "STOP_TIMEOUT_S", 0.01)
    made = Services(tmp_path / "runs", tmp_path / "examples")
    made.devices()
    yield made
    made.close()


def test_no_run_begins_while_the_last_ones_thread_lives(
    server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written its end and does not let go, such as on a GPU that hangs."""
    free = threading.Event()
    train = training_run.run

    def hang(*args: object, **options: object) -> object:
        ended = train(*args, **options)  # type: ignore[arg-type]
        free.wait()
        return ended

    monkeypatch.setattr(training_run, "run", hang)
    folder = server.start(CONFIG)
    try:
        wait_until(lambda: read_run(folder).status is RunStatus.FINISHED)
        with pytest.raises(RunError, match=f"{folder.name}"):
            server.start(CONFIG)
        assert list(server.runs.iterdir()) == [folder]
    finally:
        free.set()
    wait_until(lambda: not any("training" in thread.name for thread in threading.enumerate()))
    monkeypatch.undo()
    second = server.start(CONFIG)
    wait_until(lambda: read_run(second).status is RunStatus.FINISHED)


def test_the_end_of_a_busy_run_is_written_with_the_servers(
    server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread dies with the server: another one writes the end, and it stays."""
    train, busy, free = TrainStep.__call__, threading.Event(), threading.Event()

    def step(self: TrainStep, *batch: object) -> object:
        if len(self.optimizer.state) and not busy.is_set():
            busy.set()
            free.wait()
        return train(self, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainStep, "__call__", step)
    folder = server.start(replace(CONFIG, epochs=100_000, optimizer=Optimizer.ADAM))
    try:
        assert busy.wait(40)
        server.close()
        ended = read_run(folder)
        assert ended.status is RunStatus.STOPPED
        assert SHUT_DOWN in str(ended.reason)
        assert len(metric(folder, "train/loss")) == ended.run_json["step"]
    finally:
        free.set()
    wait_until(lambda: not any("training" in thread.name for thread in threading.enumerate()))
    assert read_run(folder).reason == ended.reason


IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_job_that_ignores_sigterm_reads_as_ended_by_force(
    server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "TERM_S", 0.1)
    folder = server.runs / "20260101-000000-job"
    folder.mkdir(parents=True)
    job = TorchrunRun.__new__(TorchrunRun)
    ChildRun.__init__(job, folder, ["-c", IGNORES_SIGTERM])
    wait_until(lambda: (folder / WORKER_LOG).read_text() == "ready\n")
    told = {"created": 1.0, "status": "running", "heartbeat": time.time(), "world_size": 2}
    write_run_json(folder, told | process_identity(job._process.pid))
    server._active = job
    server.end_job(read_run(folder))
    ended = read_run(folder)
    assert ended.status is RunStatus.STOPPED
    assert "SIGKILL" in str(ended.reason)


def test_processes_of_other_ranks_have_the_runs_name(server: Services, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "20260101-000000-job"
    folder.mkdir(parents=True)
    parent = psutil.Process(os.getppid())
    told = {"created": 1.0, "status": "running", "heartbeat": time.time(), "world_size": 2}
    told |= {"name": "job", **process_identity()}
    write_run_json(folder, told)
    write_run_json(folder, told | process_identity(parent.pid), "rank1.json")
    assert server.run_processes() == {os.getpid(): "job", parent.pid: "job"}
