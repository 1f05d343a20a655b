"""The page's buttons in a job over NCCL that hangs: nothing is held up, and all ranks act alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.run import read_run
from stepscope.session.stop import end_job
from stepscope.store.recorder import CommandName
from tests.support.jobs import PATIENCE_S, job
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("two_devices")


def test_buttons_wait_for_a_rank_that_sleeps_and_act_at_the_same_step(tmp_path: Path) -> None:
    with job(tmp_path, 2, "sleep", "1", how="nccl") as running:
        wait_for(lambda: running.step(1) == 20, PATIENCE_S)
        asked = [running.ask(name) for name in (CommandName.EMPTY_CACHE, CommandName.STOP)]
        assert running.step(1) == 20, "pressing a button waits for the job"
        for id_ in asked:
            answers = running.answers(id_)
            assert len({answer.step for answer in answers}) == 1
            assert all(answer.data["ok"] for answer in answers)
        assert running.process.wait(PATIENCE_S) != 0, "Stop acts as Ctrl-C in a script"
        assert running.statuses() == ["stopped", "stopped"]


def test_a_job_that_hangs_is_ended_by_force_while_it_hangs(tmp_path: Path) -> None:
    with job(tmp_path, 2, "sleep", "1", how="nccl") as running:
        wait_for(lambda: running.step(1) == 20, PATIENCE_S)
        running.ask(CommandName.PAUSE)
        assert "2 processes" in end_job(read_run(running.folder))
        assert running.step(1) == 20, "it has waited for the sleep to end"
        assert running.statuses() == ["stopped", "stopped"]
