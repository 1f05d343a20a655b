"""The page's buttons in a job over NCCL that hangs: nothing is held up, and all ranks act alike."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepscope.recorder.recorder import CommandName
from tests.support.jobs import PATIENCE_S, job, until

pytestmark = pytest.mark.usefixtures("two_devices")


def test_buttons_wait_for_a_rank_that_sleeps_and_act_at_the_same_step(tmp_path: Path) -> None:
    with job(tmp_path, 2, "sleep", "1", how="nccl") as running:
        until(lambda: running.step(1) == 20, "rank 1 does not come to its sleep")
        time.sleep(1.0)
        began = time.monotonic()
        asked = [running.ask(name) for name in (CommandName.EMPTY_CACHE, CommandName.STOP)]
        assert time.monotonic() - began < 5.0, "pressing a button waits for the job"
        waits = until(running.waits, "nobody says what the command waits for")
        assert waits["name"] == "empty_cache"
        assert 1 in waits["ranks"]
        for id_ in asked:
            answers = running.answers(id_)
            assert [answer.step for answer in answers] == [waits["step"]] * 2
            assert all(answer.data["ok"] for answer in answers)
        assert running.process.wait(PATIENCE_S) != 0, "Stop acts as Ctrl-C in a script"
        assert running.statuses() == ["stopped", "stopped"]
