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
)
from stepscope.run import RunInfo, RunStatus, user_name
from stepscope.store.recorder import CommandName

SCRIPT = [name for name in CommandName if name is not CommandName.SAVE_CHECKPOINT]
WATCHED: dict[str, Any] = {"kind": "watch", "commands": [str(name) for name in SCRIPT]}
LATER = (CommandName.MEMORY_SNAPSHOT, CommandName.PROFILE)
EARLY = (CommandName.STOP, CommandName.MARK)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folder, which is not there, be of this user."""
    monkeypatch.setattr("stepscope.remote.access.is_own_folder", lambda folder: True)


def run(status: RunStatus = RunStatus.RUNNING, **run_info: Any) -> RunInfo:
    ours = {"created": 0.0, "host": socket.gethostname(), "user": user_name()}
    return RunInfo(Path("run"), status, None, 0.0, {**ours, **run_info})


@pytest.mark.parametrize(
    ("info", "commands"),
    [
        (run(), set(CommandName) - {*LATER, CommandName.RESUME}),
        (run(**WATCHED), set(SCRIPT) - {CommandName.RESUME}),
        (run(RunStatus.PENDING, **WATCHED), set(EARLY)),
        (run(RunStatus.PENDING), set()),
        *((run(status), set()) for status in RunStatus if not status.live),
        (run(RunStatus.PAUSED), set(CommandName) - {*LATER, CommandName.PAUSE}),
        (run(user="eve"), set()),
        (run(host="elsewhere"), set()),
    ],
)
def test_a_run_answers_what_it_lists_in_its_state(
    info: RunInfo, commands: set[CommandName]
) -> None:
    assert {name for name in CommandName if refusal(name, info) is None} == commands


def drawn(info: RunInfo | None, status: RunStatus) -> list[str]:
    return [button["label"] for button in buttons(info) if status in button["when"]]


def test_the_buttons_follow_the_run_and_its_status() -> None:
    assert buttons(None) == buttons(run(RunStatus.FINISHED)) == buttons(run(user="eve")) == []
    running, paused = drawn(run(), RunStatus.RUNNING), drawn(run(), RunStatus.PAUSED)
    assert (running[0], paused[0], running[1:]) == ("Pause", "Resume", paused[1:])


def test_end_now_is_for_a_script_or_a_job_that_does_not_stop() -> None:
    asked = time.time() - END_NOW_S - 1
    job = {"world_size": 2, "commands": ["stop"]}
    assert not can_end_now(run(**job))
    assert not can_end_now(run(**job, stop_asked=time.time()))
    assert can_end_now(run(**job, stop_asked=asked))
    assert not can_end_now(run(stop_asked=asked)), "its process may be the server"
    assert can_end_now(run(**WATCHED, stop_asked=asked))
    assert not can_end_now(run(**job, stop_asked=asked, mirror={})), "a host of the same name"
    assert not can_end_now(run(RunStatus.STOPPED, **job, stop_asked=asked))
    silent = replace(run(**job), heartbeat_age_s=END_NOW_S + 1)
    assert can_end_now(silent)
    assert [button["name"] for button in buttons(silent)] == ["stop", "end_now"]
