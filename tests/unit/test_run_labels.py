"""Labels of runs: enough to choose by, never two alike."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from dashboard.controls.run_picker import labels, run_name
from stepscope.run import RunInfo, RunStatus, user_name

NOON = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


def run(name: str, status: RunStatus = RunStatus.RUNNING, **run_info: Any) -> RunInfo:
    known = {"name": name, "created": NOON, "host": socket.gethostname(), "user": user_name()}
    return RunInfo(Path(name), status, None, 0.0, {**known, **run_info})


def label(info: RunInfo) -> str:
    return labels([info], {})[info.id]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folders, which are not there, be of this user."""
    monkeypatch.setattr("stepscope.remote.access.is_own_folder", lambda folder: True)


def test_a_label_has_name_kind_state_and_time() -> None:
    watched = run("train", kind="watch", script={"path": "/home/me/train.py"})
    ended = run("digits_cnn", RunStatus.FINISHED, ended=NOON + 185)
    crashed = run("x", RunStatus.CRASHED, kind="init")
    for info, expected in (
        (watched, "● train.py · watched · running · since 21 Nov 12:00"),
        (ended, "digits_cnn · built-in · finished · 21 Nov 12:00 · 3 min 05 s"),
        (crashed, "x · script · crashed · 21 Nov 12:00"),
    ):
        assert label(info) == expected
    assert label(run("train", user="eve", host="far")).endswith(" · eve@far")
    assert run_name(run("my run", script={"path": "/home/me/train.py"})) == "my run"
    assert run_name(run("x" * 500)) == "x" * 60
    assert "\x1b" not in run_name(run("a\x1b[2Jb"))


def test_no_two_labels_are_alike() -> None:
    one = run("train")
    made = labels([one, RunInfo(Path("id-1"), one.status, None, 0.0, one.run_json)], {})
    assert len(set(made.values())) == 2
