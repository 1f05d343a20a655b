"""Git, run with a time limit: it ends with all that it started, and the error has the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope.host import git
from stepscope.host.git import GitError, git_output
from tests.support.child_process import is_running
from tests.support.waiting import wait_until


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the pid of what a git that prints a line and waits has started."""
    program, child = tmp_path / "git", tmp_path / "child"
    program.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! > {child}\necho ready $GIT_TERMINAL_PROMPT\nwait\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return child


@pytest.mark.parametrize(("fetches", "limit"), [(False, "LIMIT_S"), (True, "FETCH_LIMIT_S")])
def test_git_is_killed_after_its_time_limit(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetches: bool, limit: str
) -> None:
    monkeypatch.setattr(git, limit, 0.5)
    with (
        pytest.raises(GitError, match=r"^git does not end within 0\.5 s$"),
        git_output(tmp_path, "status", fetches=fetches) as output,
    ):
        assert output.read() == b"ready 0\n"
    wait_until(lambda: not is_running(int(child.read_text())))


def test_git_is_killed_if_the_block_raises(child: Path, tmp_path: Path) -> None:
    def use() -> None:
        with git_output(tmp_path, "archive") as output:
            assert output.readline() == b"ready 0\n"
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        use()
    wait_until(lambda: not is_running(int(child.read_text())))
