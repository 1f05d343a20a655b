"""Attempts of a job: which folder, what from, and how the one before is said to have ended."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.run import RunStatus, process_identity, read_run, restart_expected, write_run_json
from stepscope.store import StoreWriter, store_name
from stepscope.store.blocks import Event
from tests.support.recorded_runs import write_run
from trainer.config import RunConfig, Runner, Strategy
from trainer.runners.job_outcome import end_of, ended_by_signal, note_job_end
from trainer.runners.restart_attempts import (
    attempt,
    attempt_folder,
    begin,
    checkpoint_step,
    complete,
    free_number,
    newest_number,
)

CONFIG = RunConfig(strategy=Strategy.DDP, runner=Runner.TORCHRUN, devices_per_node=2)
GONE = {"pid": 2**22 + 7, "pid_started": 1.0}
"""Entries of a process that is not there any more."""


def job(root: Path, ranks: int = 2, **changes: Any) -> Path:
    """Write a folder of ranks that are all gone without a message; `rankK` changes one of them."""
    folder = root / "job"
    for number in range(ranks):
        base = {"status": "running", "world_size": ranks, "rank": number, "step": 40 + number}
        base |= process_identity() | GONE | {"pid": GONE["pid"] + number}
        base |= {"created": time.time(), "heartbeat": time.time() - 60, "reason": None}
        base |= changes.get(f"rank{number}", {})
        write_run(folder, base if number == 0 else None, rank=number)
        name = "run.json" if number == 0 else f"rank{number}.json"
        write_run_json(folder, base, name)
        os.utime(folder / name, (time.time() - 60,) * 2)
    return folder


def printed(root: Path, code: int, number: int) -> Path:
    """Write what torchrun prints of the rank that it has seen fail."""
    log = root / "worker.log"
    pid = GONE["pid"] + number
    log.write_text(f"E1122 api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: {pid}) of\n")
    return log


def checkpoint(folder: Path, name: str, step: int, age_s: float = 0.0) -> None:
    (folder / name).write_bytes(b"weights")
    os.utime(folder / name, (time.time() - age_s,) * 2)
    writer = StoreWriter(folder / store_name(0), reopen=True)
    with writer.transaction():
        writer.add_event(Event(1.0, step, 1, "checkpoint", name, {"ok": True, "path": name}))
    writer.close()


PEER: dict[str, Any] = {"status": "failed", "reason": "RuntimeError: Connection closed by peer"}
OWN = PEER | {"reason": "Training raised ValueError: no."}


@pytest.mark.parametrize(
    ("ranks", "code", "rank", "short"),
    [
        ({}, -9, 1, "rank 1 was killed (SIGKILL)"),
        ({}, 3, 0, "rank 0 exited without a message (exit code 3)"),
        ({"rank0": PEER, "rank1": OWN}, 1, 1, "rank 1 failed: Training raised ValueError: no"),
        # Another version of torchrun may print something else.
        ({"rank0": PEER}, None, 1, "rank 1 was killed, or exited without a message"),
    ],
)
def test_the_end_of_a_job_is_that_of_its_first_rank(
    tmp_path: Path, ranks: dict[str, Any], code: int | None, rank: int, short: str
) -> None:
    log = tmp_path / "missing.log" if code is None else printed(tmp_path, code, rank)
    ended = {"ended": time.time() + 600.0}  # after the heartbeat of rank 1
    end = end_of(job(tmp_path, **{name: ended | known for name, known in ranks.items()}), log)
    assert (end.status, end.rank, end.short) == (RunStatus.FAILED, rank, short)
    assert end.sentence == f"R{short[1:]}."


def test_a_kill_for_lack_of_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = "trainer.runners.job_outcome.kills_since"
    monkeypatch.setattr(kills, lambda first: first and first["count"])
    end = end_of(job(tmp_path, rank1={"oom_kills": {"count": 1}}), printed(tmp_path, -9, 1))
    assert "was killed by the system (SIGKILL): out of memory. Use a smaller batch" in end.short


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Traceback\nImportError: libtorch is broken\n", "ImportError: libtorch is broken"),
        ("[rank1]: ValueError: no\ntorch.x.ChildFailedError: FAILED\n", "ValueError: no"),
        ("/bin/python: No module named torch\n", "No module named torch"),
        ("", "torchrun has printed nothing"),
    ],
)
def test_a_job_that_cannot_start_says_why(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "job").mkdir()
    log = tmp_path / "worker.log"
    log.write_text(text)
    end = end_of(tmp_path / "job", log)
    assert end.status is RunStatus.FAILED
    assert why in end.short
    assert "(exit code -15)" in end_of(tmp_path / "job", printed(tmp_path, -15, 0)).short


def test_torchrun_that_ended_by_signal_is_no_failure(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    assert not ended_by_signal(log)
    log.write_text("x.SignalException: Process 1 got signal: 15\n")
    assert ended_by_signal(log)


def test_the_page_reads_the_noted_end_and_a_rank_keeps_its_own(tmp_path: Path) -> None:
    folder = job(tmp_path)
    note_job_end(folder, end_of(folder, printed(tmp_path, -9, 1)), restarted_as="job-restart1")
    run = read_run(folder)
    assert (run.status, run.reason) == (RunStatus.FAILED, "Rank 1 was killed (SIGKILL).")
    assert (run.cause, run.cause_rank) == (1, 1)
    assert run.run_json["restarted_as"] == "job-restart1"
    # A second look finds the same, whatever torchrun has printed since.
    assert end_of(folder, printed(tmp_path, 1, 0)).short == "rank 1 was killed (SIGKILL)"
    folder = job(tmp_path / "own", rank0=PEER | {"ended": 1e9})
    note_job_end(folder, end_of(folder, printed(tmp_path, -9, 1)))
    kept = json.loads((folder / "run.json").read_text())
    assert (kept["reason"], kept["ended"]) == (PEER["reason"], 1e9)
    assert read_run(folder).cause_rank == 1


def test_a_restart_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    first = job(tmp_path)
    checkpoint(first, "best.pt", 10)
    checkpoint(first, "last.pt", 20, age_s=5)
    checkpoint(first, "step-30.pt", 30)
    this = attempt(first, 1, CONFIG)
    assert this.folder == attempt_folder(first, 1) == tmp_path / "job-restart1"
    assert (this.config.resume_from, this.former) == ("job/step-30.pt", first)
    assert checkpoint_step(first / "last.pt") == 20
    (tmp_path / "job-restart1").mkdir()  # without a checkpoint
    this = attempt(first, 2, CONFIG)
    assert (this.config.resume_from, this.former) == ("job/step-30.pt", tmp_path / "job-restart1")
    other = attempt(tmp_path / "other", 1, replace(CONFIG, resume_from="old/best.pt"))
    assert (other.config.resume_from, other.former) == ("old/best.pt", None)


def test_begin_links_both_folders_and_says_what_happened(tmp_path: Path) -> None:
    first = job(tmp_path)
    checkpoint(first, "last.pt", 1234)
    restart = begin(attempt(first, 1, CONFIG), printed(tmp_path, -9, 1), 3)
    assert restart is not None
    text = "Restart 1 of 3: rank 1 was killed (SIGKILL); resumes after step 1,234."
    assert restart.text == text
    pending = read_run(tmp_path / "job-restart1")
    assert pending.status is RunStatus.PENDING
    assert str(pending.reason).startswith(text)
    assert pending.run_json["restart_of"] == "job"
    assert pending.run_json["restart"]["exit_code"] == -signal.SIGKILL
    assert read_run(first).run_json["restarted_as"] == "job-restart1"


STOPPED = {"status": "stopped", "reason": "torchrun was told to stop.", "ended": 5.0}
FINISHED = {"status": "finished", "ended": 5.0}


def test_an_attempt_after_an_orderly_stop_tells_of_no_failure(tmp_path: Path) -> None:
    """As Slurm starts a job again whose time was up."""
    first = job(tmp_path, rank0=STOPPED, rank1=STOPPED)
    restart = begin(attempt(first, 1, CONFIG), tmp_path / "missing.log", 0)
    assert restart is not None
    how = "stopped after step 40; no checkpoint yet, starting from scratch"
    assert restart.text == f"Restart 1: {how}."
    assert restart.run_json["restart"]["exit_code"] is None
    stopped = read_run(first)
    assert (stopped.status, stopped.reason) == (RunStatus.STOPPED, STOPPED["reason"])
    assert "job_end" not in stopped.run_json
    assert stopped.run_json["restarted_as"] == "job-restart1"


def test_a_job_is_complete_once_its_newest_attempt_has_finished(tmp_path: Path) -> None:
    first = job(tmp_path, rank0=STOPPED, rank1=STOPPED)
    assert complete(first, 0) is None
    assert complete(first, 1) is None
    second = job(tmp_path / "second", rank0=FINISHED, rank1=FINISHED)
    second.rename(attempt_folder(first, 1))
    assert complete(first, 2) == "The job is complete: job-restart1 has finished."


def test_an_attempt_is_free_until_a_rank_has_recorded(tmp_path: Path) -> None:
    first = tmp_path / "job"
    first.mkdir()
    (first / "run.json").write_text("{}")
    assert free_number(first, 0) == 0
    job(tmp_path)
    assert free_number(first, 0) == 1
    assert newest_number(first, 3) == 0
    (tmp_path / "job-restart2").mkdir()
    assert newest_number(first, 3) == 0
    begin(attempt(first, 2, CONFIG), tmp_path / "worker.log", 3)  # no rank of attempt 1 has come
    assert newest_number(first, 3) == 2


def test_a_restart_is_expected_while_torchrun_runs(tmp_path: Path) -> None:
    def torchrun(**changes: Any) -> dict[str, Any]:
        return {"torchrun": process_identity() | {"restarts": 0, "max_restarts": 1} | changes}

    def expected(**changes: Any) -> bool:
        folder = job(tmp_path / str(len(list(tmp_path.iterdir()))), rank0=changes)
        return restart_expected(read_run(folder))

    assert expected(**torchrun())
    assert not expected()
    assert not expected(**torchrun(), restarted_as="job-restart1")
    for changes in ({"restarts": 1}, GONE, {"max_restarts": "3"}, {"restarts": None}):
        assert not expected(**torchrun(**changes)), changes
    done = {"status": "finished", "ended": time.time()}
    folder = job(tmp_path / "done", rank0=torchrun() | done, rank1=done)
    assert not restart_expected(read_run(folder))
