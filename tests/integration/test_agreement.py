"""The page's buttons in jobs of several ranks, over gloo: all ranks serve them at the same step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from stepscope.run import read_run, run_folders
from stepscope.session import stop
from stepscope.store.recorder import CommandName
from tests.support.jobs import PATIENCE_S, job, training
from tests.support.waiting import wait_for
from trainer.config import Strategy


def test_each_button_acts_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    """Rank 1 sleeps for some seconds at first: it serves what is asked meanwhile later."""
    buttons = [CommandName.EMPTY_CACHE, CommandName.COLLECT_GARBAGE, CommandName.PAUSE] * 3
    with job(tmp_path, 3, "sleep", "1", restarts=1) as running:
        wait_for(lambda: running.step(1) == 20, PATIENCE_S)
        asked = [running.ask(name) for name in (CommandName.PAUSE, CommandName.RESUME)]
        running.answers(asked[-1])
        for button in buttons:
            time.sleep(0.07)
            asked.append(running.ask(button))
            if button is CommandName.PAUSE:
                asked += [running.ask(CommandName.MARK), running.ask(CommandName.RESUME)]
        for id_ in asked:
            answers = running.answers(id_)
            assert all(answer.data["ok"] for answer in answers), answers
            assert len({answer.step for answer in answers}) == 1, answers
        # Number 0's own events may be stored later, with what came of it on all ranks.
        in_time = [sorted(running.events(rank), key=lambda event: event.ts) for rank in range(3)]
        orders = [[event.data["command_id"] for event in events] for events in in_time]
        assert orders == [asked] * 3
        before = running.step()
        wait_for(lambda: running.step() > before, PATIENCE_S)
        stopped = running.answers(running.ask(CommandName.STOP))
        assert len({answer.step for answer in stopped}) == 1
        running.process.wait(PATIENCE_S)
        assert running.statuses() == ["stopped"] * 3
        assert len(list(run_folders(tmp_path / "runs"))) == 1, "torchrun has started it again"


def test_a_suspended_rank_has_the_command_withdrawn_and_is_ended_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM does not end it; torchrun must start nothing again."""
    monkeypatch.setattr(stop, "KILL_S", PATIENCE_S)  # a busy machine takes long for it
    with job(tmp_path, 2) as running:
        os.kill(running.pid(1), signal.SIGSTOP)
        withdrawn = running.answer(running.ask(CommandName.PAUSE))
        assert not withdrawn.data["ok"]
        assert "rank 1" in withdrawn.text
        os.kill(running.pid(1), signal.SIGCONT)
        before = running.step()
        wait_for(lambda: running.step() > before, PATIENCE_S)
        answers = running.answers(running.ask(CommandName.MARK))
        assert answers[0].step == answers[1].step
        assert [event.kind for event in running.events(1)] == ["mark"]
        os.kill(running.pid(1), signal.SIGSTOP)
        assert "2 processes" in stop.end_job(read_run(running.folder))
        assert running.process.wait(PATIENCE_S) != 0
        assert running.statuses() == ["stopped", "stopped"]
        assert len(list(run_folders(tmp_path / "runs"))) == 1


def test_a_rank_that_is_killed_or_has_ended_holds_nobody_up(tmp_path: Path) -> None:
    with job(tmp_path, 3, "end", "2", how="apart") as running:
        wait_for(lambda: running.statuses()[2] == "finished", PATIENCE_S)
        answers = running.answer(running.ask(CommandName.MARK))
        assert answers.data["ok"]
        os.kill(running.process.pid, signal.SIGSTOP)  # torchrun would end the others as well
        os.kill(running.pid(1), signal.SIGKILL)
        withdrawn = running.answer(running.ask(CommandName.PAUSE))
        assert not withdrawn.data["ok"]
        assert "gone" in withdrawn.text, "not by the time-out"
        before = running.step()
        wait_for(lambda: running.step() > before, PATIENCE_S)


def test_a_training_of_ours_serves_and_stops_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    """Of FSDP, where saving a checkpoint is a collective itself."""
    with training(tmp_path, Strategy.FSDP) as running:
        asked = [
            running.ask(name)
            for name in (
                CommandName.SAVE_CHECKPOINT,
                CommandName.PAUSE,
                CommandName.SAVE_CHECKPOINT,
                CommandName.RESUME,
                CommandName.EMPTY_CACHE,
                CommandName.STOP,
            )
        ]
        for id_ in asked:
            answers = running.answers(id_)
            assert all(answer.data["ok"] for answer in answers), answers
            assert len({answer.step for answer in answers}) == 1, answers
        assert running.process.wait(PATIENCE_S) == 0
        assert running.statuses() == ["stopped", "stopped"]
        assert list(running.folder.glob("step-*.pt*"))
        assert (running.folder / "last.pt").exists()
