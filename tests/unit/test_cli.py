"""The console command lists what is there and says what to do when nothing is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.cli import main
from tests.unit.test_run import make_run


def test_runs_lists_newest_first_and_skips_the_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    assert main(["runs"]) == 0
    assert "STEPSCOPE_RUNS" in capsys.readouterr().out
    make_run(tmp_path, "first", status="finished", step=7)
    (make_run(tmp_path, "torn") / "run.json").write_text("{")
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert "finished" in out
    assert len(out.splitlines()) == 1
    assert "not a Stepscope run" in err


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("stepscope")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("stepscope ")
