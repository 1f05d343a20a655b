"""A run of several ranks tells what ended it first, not what the others died of."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stepscope.run import RunInfo, RunStatus, process_identity, read_run, write_run_json
from stepscope.run.folder import TRACEBACK_FILE, rank_file
from stepscope.run.rank_info import RankExit, first_cause
from stepscope.store.recorder import Recorder
from tests.support.run_folders import GONE_PID, RankFolder
from trainer.runners.rank_worker import AFTER_PEER

PEER = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:4321"
TIMED_OUT = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"


def said(number: int, ts: float, reason: str = "ValueError: no") -> RankExit:
    return RankExit(number, ts, ts, reason)


def gone(number: int, beat: float, *, terminated: bool = False) -> RankExit:
    return RankExit(number, beat, beat + 10, None, terminated)


@pytest.mark.parametrize(
    ("ends", "causes"),
    [
        ([], []),
        # A script that closes its process group first: the symptom is a moment before the cause.
        ([said(0, 9.9, PEER), said(1, 10)], [1]),
        # Killed by the launcher after the error; its last heartbeat may be from before it.
        ([gone(0, 10.5), said(1, 10)], [1]),
        # Killed first: what the other one says is that it is gone.
        ([said(0, 10.1, PEER), gone(1, 9.5)], [1]),
        ([said(0, 2000, TIMED_OUT), gone(1, 200)], [1]),
        # It was late, and lived: the launcher killed it because of the other one's end.
        ([said(0, 10, TIMED_OUT), gone(1, 10.5)], [0]),
        ([gone(0, 10), gone(1, 10.8), gone(2, 30)], [0, 1]),
        # The launcher has terminated the others, whose heartbeats are as old.
        ([gone(0, 9.5, terminated=True), gone(1, 10.2), gone(2, 10, terminated=True)], [1]),
        ([said(0, 10, PEER), gone(1, 10, terminated=True), gone(2, 10.5)], [2]),
    ],
)
def test_the_first_cause_in_time(ends: list[RankExit], causes: list[int]) -> None:
    assert [end.number for end in first_cause(ends)] == causes


class Job(RankFolder):
    def read(self) -> tuple[RunStatus, str | None, int]:
        run: RunInfo = read_run(self.folder)
        return run.status, run.reason, run.cause


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, created=1.0, world_size=2)


def test_an_error_of_another_rank_is_the_runs(job: Job) -> None:
    job.rank(0, "failed", reason=PEER, ended=11.0)
    failure: dict[str, object] = {"ts": 10.0, "reason": "ValueError: no"}
    job.rank(1, "failed", reason="ValueError: no", ended=12.0, failure=failure)
    assert job.read() == (RunStatus.FAILED, "Rank 1: ValueError: no", 1)
    failure = {"ts": time.time(), "reason": "ValueError: no"}
    job.rank(1, "running", failure=failure)  # it still runs what the script does at its end
    for status, pid in (("running", GONE_PID), ("finished", GONE_PID)):
        job.rank(0, status, pid=pid)
        assert job.read() == (RunStatus.FAILED, "Rank 1: ValueError: no", 1)


@pytest.mark.parametrize("signal", ["Aborted", None])
def test_of_a_rank_that_was_killed_the_fatal_signal_is_named(job: Job, signal: str | None) -> None:
    now = time.time()
    job.rank(0, "running", pid=GONE_PID, heartbeat=now - 0.5)
    job.rank(1, "failed", reason=PEER if signal else AFTER_PEER, ended=now)
    if signal is not None:
        (job.folder / "traceback.txt").write_text(f"Fatal Python error: {signal}\n")
    status, reason, cause = job.read()
    assert (status, cause) == (RunStatus.CRASHED, 0)
    start = f"Rank 0 was killed by a fatal signal ({signal}, see" if signal else "Rank 0 is gone"
    assert str(reason).startswith(start)


def test_a_rank_that_its_launcher_has_terminated_is_not_the_cause(job: Job) -> None:
    for number, beat in ((0, time.time() - 0.8), (1, time.time() - 0.5)):
        job.rank(number, "running", pid=GONE_PID, heartbeat=beat)
        (job.folder / rank_file(TRACEBACK_FILE, number)).write_text("")
    assert "All 2 ranks are gone" in str(job.read()[1])
    (job.folder / TRACEBACK_FILE).write_text("Stack (most recent call first):\n")
    status, _, cause = job.read()
    assert (status, cause) == (RunStatus.CRASHED, 1)


def test_a_rank_killed_before_its_first_heartbeat_leaves_the_cause_to_the_others(
    tmp_path: Path,
) -> None:
    """As where torchrun ends it because another one has refused to start."""
    recorder = Recorder(tmp_path, name="job", ranks=2)
    own = json.loads((tmp_path / "run.json").read_text()) | {"pid": GONE_PID}
    recorder.close(RunStatus.FAILED)
    write_run_json(tmp_path, own)
    refusal = {"rank": 1, "status": "failed", "reason": "ranks: no", "ended": time.time()}
    write_run_json(tmp_path, own | refusal, "rank1.json")
    run = read_run(tmp_path)
    assert (run.status, run.reason) == (RunStatus.FAILED, "Rank 1: ranks: no")


def test_a_stop_stays_a_stop(job: Job) -> None:
    job.rank(0, "stopped", reason="Stopped from the page.", ended=10.0)
    job.rank(1, "failed", reason=PEER, ended=10.1)
    assert job.read() == (RunStatus.STOPPED, "Stopped from the page.", 0)


@pytest.mark.parametrize("text", ["[]", '{"status": 1, "heartbeat": "x"}'])
def test_a_ranks_facts_that_cannot_be_read_change_nothing(job: Job, text: str) -> None:
    job.rank(0, "failed", reason="ValueError: no", ended=10.0, world_size=3)
    (job.folder / "rank1.json").write_text(text)
    job.rank(2, "failed", rank=[], host={}, failure=7, ended=None, reason=None)
    assert job.read()[1] == "Rank 0 (" + process_identity()["host"] + "): ValueError: no"
