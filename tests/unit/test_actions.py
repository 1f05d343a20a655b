"""Each button knows for a run whether it can act, and says why it cannot."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from dashboard.controls.actions import ACTIONS, help_of, refusal, supported_commands
from stepscope.recording.recorder import CommandName
from stepscope.run import RunInfo, RunStatus, user_name

SCRIPT = [name for name in CommandName if name is not CommandName.SAVE_CHECKPOINT]
BY_NAME = {action.name: action for action in ACTIONS}


def run(status: RunStatus = RunStatus.RUNNING, **run_info: Any) -> RunInfo:
    ours = {"created": 0.0, "host": socket.gethostname(), "user": user_name()}
    return RunInfo(Path("run"), status, None, 0.0, {**ours, **run_info})


def possible(info: RunInfo) -> set[CommandName]:
    return {name for name in CommandName if refusal(name, info) is None}


def test_a_run_that_lists_nothing_answers_all_but_the_snapshot() -> None:
    assert supported_commands(run()) == set(CommandName) - {CommandName.MEMORY_SNAPSHOT}
    assert possible(run()) == supported_commands(run()) - {CommandName.RESUME}


def test_only_what_a_run_answers_can_be_asked() -> None:
    watched = run(kind="watch", commands=[str(name) for name in SCRIPT], device="GPU-1")
    assert possible(watched) == set(SCRIPT) - {CommandName.RESUME}
    assert "own checkpoints" in str(refusal(CommandName.SAVE_CHECKPOINT, watched))
    recording = run(kind="record", commands=["mark", "stop"])
    assert possible(recording) == {CommandName.MARK, CommandName.STOP}
    assert "no training" in str(refusal(CommandName.PAUSE, recording))


@pytest.mark.parametrize(("device", "word"), [("cpu", "CPU"), (None, "no optimizer step yet")])
def test_a_snapshot_needs_cuda(device: str | None, word: str) -> None:
    watched = run(kind="watch", commands=["stop"], **({"device": device} if device else {}))
    assert word in str(refusal(CommandName.MEMORY_SNAPSHOT, watched))


def test_a_paused_run_resumes_and_does_not_pause_again() -> None:
    paused = run(RunStatus.PAUSED)
    assert refusal(CommandName.RESUME, paused) is None
    assert refusal(CommandName.PAUSE, paused) == "the run is paused already."


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
    assert "look only" in str(refusal(CommandName.STOP, run(**run_json)))


def test_help_says_what_happens_to_a_script_and_why_not_now() -> None:
    watched = run(kind="watch", commands=["pause", "stop"])
    assert "next optimizer step" in help_of(BY_NAME[CommandName.PAUSE], watched)
    assert "SIGTERM, then SIGKILL" in help_of(BY_NAME[CommandName.STOP], watched)
    assert "SIGTERM" not in help_of(BY_NAME[CommandName.STOP], run())
    assert "Not now: a watched" in help_of(BY_NAME[CommandName.SAVE_CHECKPOINT], watched)
    foreign = run(user="[x](http://evil)")
    assert "\\[x\\]" in help_of(BY_NAME[CommandName.STOP], foreign)  # no link of theirs
