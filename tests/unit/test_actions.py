"""Each button knows for a run whether it can act, and says why it cannot."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dashboard.controls.actions import (
    END_NOW_S,
    buttons,
    can_end_now,
    refusal,
    start_refusal,
    supported_commands,
)
from stepscope.recorder.recorder import CommandName
from stepscope.run import RunInfo, RunStatus, user_name
from trainer.config import ConfigIssue

SCRIPT = [name for name in CommandName if name is not CommandName.SAVE_CHECKPOINT]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folder, which is not there, be of this user."""
    monkeypatch.setattr("stepscope.run.info.is_own_folder", lambda folder: True)


def run(status: RunStatus = RunStatus.RUNNING, **run_info: Any) -> RunInfo:
    ours = {"created": 0.0, "host": socket.gethostname(), "user": user_name()}
    return RunInfo(Path("run"), status, None, 0.0, {**ours, **run_info})


def possible(info: RunInfo) -> set[CommandName]:
    return {name for name in CommandName if refusal(name, info) is None}


def test_a_run_that_lists_nothing_answers_what_there_was_at_first() -> None:
    later = {CommandName.MEMORY_SNAPSHOT, CommandName.PROFILE}
    assert supported_commands(run()) == set(CommandName) - later
    assert possible(run()) == supported_commands(run()) - {CommandName.RESUME}


def test_only_what_a_run_answers_can_be_asked() -> None:
    watched = run(kind="watch", commands=[str(name) for name in SCRIPT], device="GPU-1")
    assert possible(watched) == set(SCRIPT) - {CommandName.RESUME}
    recording = run(kind="record", commands=["mark", "stop"])
    assert possible(recording) == {CommandName.MARK, CommandName.STOP}
    assert "does not support" in str(refusal(CommandName.PAUSE, recording))


def test_a_paused_run_resumes_and_does_not_pause_again() -> None:
    paused = run(RunStatus.PAUSED)
    assert refusal(CommandName.RESUME, paused) is None
    assert refusal(CommandName.PAUSE, paused) == "the run is already paused."


def test_before_the_first_step_a_script_can_be_stopped_and_the_trainer_waits() -> None:
    names = [str(name) for name in SCRIPT]
    for kind in ("watch", "init", "record"):
        pending = run(RunStatus.PENDING, kind=kind, commands=names)
        assert possible(pending) == {CommandName.STOP, CommandName.MARK}
    assert possible(run(RunStatus.PENDING)) == set()


@pytest.mark.parametrize("status", [status for status in RunStatus if not status.live], ids=str)
def test_an_ended_run_answers_nothing(status: RunStatus) -> None:
    assert possible(run(status)) == set()
    assert str(status) in str(refusal(CommandName.STOP, run(status)))


@pytest.mark.parametrize("run_json", [{"user": "eve"}, {"host": "elsewhere"}])
def test_a_run_of_others_can_only_be_looked_at(run_json: dict[str, str]) -> None:
    assert possible(run(**run_json)) == set()
    assert "read-only" in str(refusal(CommandName.STOP, run(**run_json)))


def drawn(info: RunInfo | None, status: RunStatus) -> list[str]:
    return [button["label"] for button in buttons(info) if status in button["when"]]


def test_a_button_that_a_run_cannot_have_is_not_drawn() -> None:
    recording = run(kind="record", commands=["mark", "stop"])
    assert drawn(recording, RunStatus.RUNNING) == ["Stop", "Mark"]
    assert buttons(None) == buttons(run(RunStatus.FINISHED)) == buttons(run(user="eve")) == []


def test_pause_and_resume_share_a_place() -> None:
    running, paused = drawn(run(), RunStatus.RUNNING), drawn(run(), RunStatus.PAUSED)
    assert (running[0], paused[0], running[1:]) == ("Pause", "Resume", paused[1:])


def test_a_button_that_is_possible_but_not_now_says_why() -> None:
    (pause,) = [button for button in buttons(run()) if button["name"] == "pause"]
    assert pause["when"] == {"pending": "the first step has not finished yet.", "running": None}


def test_the_memory_buttons_are_told_from_the_others() -> None:
    beside = {button["name"] for button in buttons(run()) if button["memory"]}
    assert beside == {"empty_cache", "reset_peaks", "collect_garbage"}


def test_help_says_what_happens_to_a_script() -> None:
    def help_of(name: str, info: RunInfo) -> str:
        return next(str(button["help"]) for button in buttons(info) if button["name"] == name)

    watched = run(kind="watch", commands=["pause", "stop"])
    assert "next optimizer step" in help_of("pause", watched)
    assert "SIGTERM, then SIGKILL" in help_of("stop", watched)
    assert "SIGTERM" not in help_of("stop", run())


def test_start_says_what_is_in_its_way() -> None:
    wrong = ConfigIssue("precision", "fp16 needs CUDA", "Choose fp32")
    assert start_refusal(None, ()) is None
    assert "fp16 needs CUDA" in str(start_refusal(None, (wrong,)))
    assert start_refusal("run-1 is active.", (wrong,)) == "run-1 is active."


def test_end_now_is_for_a_job_that_does_not_stop() -> None:
    asked = time.time() - END_NOW_S - 1
    job = {"world_size": 2, "commands": ["stop"]}
    assert not can_end_now(run(**job))
    assert not can_end_now(run(**job, stop_asked=time.time()))
    assert can_end_now(run(**job, stop_asked=asked))
    assert not can_end_now(run(stop_asked=asked)), "one process is no job"
    assert not can_end_now(run(**job, stop_asked=asked, host="another"))
    assert not can_end_now(run(RunStatus.STOPPED, **job, stop_asked=asked))
    silent = replace(run(**job), heartbeat_age_s=END_NOW_S + 1)
    assert can_end_now(silent)
    assert [button["name"] for button in buttons(silent)] == ["stop", "end_now"]
