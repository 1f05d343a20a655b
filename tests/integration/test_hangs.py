"""Jobs that hang, over gloo and real torchrun: rank and collective are named while they hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepscope.compare.reports import run_report
from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.distributed.hangs.cases import HangCause
from stepscope.run import RunStatus, read_run
from tests.support.jobs import NAMED_S, diagnosed, hanging, named_hang
from tests.support.run_values import events
from tests.support.waiting import wait_for, wait_until


def test_a_rank_that_sleeps_is_named_and_where_it_is(tmp_path: Path) -> None:
    with hanging("sleep", tmp_path, ranks=3, HANGING_S="25") as job:
        found = named_hang(job)
        while len(found.waiting) < 2:  # each writes its file when its own steps are overdue
            found = named_hang(job)
        assert (found.cause, found.ranks) == (HangCause.NOT_ENTERED, (1,))
        assert found.waiting == (0, 2)
        assert found.operation == "all_reduce #81 (16 B)"
        assert "in hang." in found.text
        [said] = diagnosed(job.folder, "hang")
        assert (said["rank"], said["share"]) == (1, None)
        assert "all_reduce #81" in said["text"]
        _wait_for_event(job.folder, "hang")
        wait_until(lambda: not list(job.folder.glob("hang-*")), 60)  # each rank's own
        _wait_for_event(job.folder, "hang_over")


def test_a_job_that_was_killed_while_it_hung_has_the_cause_in_its_report(tmp_path: Path) -> None:
    with hanging("sleep", tmp_path) as job:
        named_hang(job)
    # Killed processes are still there for a moment.
    wait_until(lambda: not read_run(job.folder).status.live)
    ended = read_run(job.folder)
    assert ended.status is RunStatus.CRASHED
    html = run_report([ended])
    for text in ("all_reduce #81", " in hang\n"):
        assert text in html
    assert str(tmp_path) not in html


@pytest.mark.parametrize(
    ("what", "cause", "phase"),
    [
        ("stop", HangCause.SILENT, None),
        ("mismatch", HangCause.MISMATCH, "communication"),
    ],
)
def test_how_a_rank_hangs_is_named(
    tmp_path: Path, what: str, cause: HangCause, phase: str | None
) -> None:
    with hanging(what, tmp_path) as job:
        found = named_hang(job)
        assert (found.cause, found.phase) == (cause, phase), found.text
        assert 1 in found.ranks


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """gloo's other ranks fail at once: that is no hang, and the run names the rank."""
    with hanging("kill", tmp_path) as job:

        def named() -> set[int | None]:
            said = findings(read_recorded(read_run(job.folder)))
            return {one.rank for one in said if one.kind in ("crashed", "rank-dead")}

        assert wait_for(named) == {1}
        job.process.wait(60)
        assert str(read_run(job.folder).reason).startswith("Rank 1 ")


def test_training_that_runs_and_validates_has_no_record(tmp_path: Path) -> None:
    with hanging("validate", tmp_path, HANGING_END="60", HANGING_S="9") as job:
        while job.process.poll() is None:
            assert not list(job.folder.glob("hang-*"))
            time.sleep(0.2)
        assert job.process.returncode == 0, job.log.read_text()[-3000:]


def _wait_for_event(folder: Path, kind: str) -> None:
    wait_until(lambda: any(event.kind == kind for event in events(folder)), NAMED_S)
