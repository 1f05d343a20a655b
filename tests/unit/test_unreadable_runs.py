"""A folder of runs, or a run, that is missing or cannot be read: an error with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope
from stepscope.cli import main
from stepscope.run import RunError
from tests.support.other_user import not_root, reachable_folder
from tests.support.run_folders import make_run

OF_A_RUN = (
    ["diagnose", "RUN"],
    ["compare", "RUN", "--to", "RUN"],
    ["report", "RUN", "-o", "report.html"],
    ["export", "RUN", "--format", "csv"],
)
OF_ALL = (
    ["runs"],
    ["gc", "--keep-days", "0"],
)


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that another user can enter, unlike that of pytest."""
    with reachable_folder() as folder:
        yield folder


def commands(run: str) -> list[list[str]]:
    named = [[run if word == "RUN" else word for word in words] for words in OF_A_RUN]
    return [*OF_ALL, *named]


def errors(capsys: pytest.CaptureFixture[str], reason: str, run: str = "RUN") -> list[list[str]]:
    """Return the commands that do not fail, or whose error lacks the reason."""
    wrong = []
    for words in commands(run):
        code = main(words)
        out, err = capsys.readouterr()
        if code == 0 or out or reason not in err:
            wrong.append([*words, out, err])
    return wrong


@pytest.mark.parametrize("kind", ["file", "missing", "denied"])
def test_every_command_names_the_folder_that_cannot_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    runs = root / "runs"
    if kind == "file":
        runs.write_text("")
    elif kind == "denied":
        make_run(runs, "kept", status="finished")
        runs.chmod(0)
    monkeypatch.setenv("STEPSCOPE_RUNS", str(runs))
    monkeypatch.chdir("/")
    main(["compare", "x", "--to", "y"])  # imports, which another user may not be allowed to
    capsys.readouterr()
    with not_root():
        assert errors(capsys, str(runs)) == []
        with pytest.raises(RunError, match=str(runs)):
            stepscope.open("kept-run")


def test_a_missing_default_folder_has_no_runs_yet(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STEPSCOPE_RUNS", raising=False)
    monkeypatch.chdir(root)
    assert main(["runs"]) == 0
    assert str(root / "runs") in capsys.readouterr().out


@pytest.mark.parametrize("mode", [0, 0o444])
def test_a_run_that_cannot_be_entered_is_named_beside_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    runs = root / "runs"
    denied = make_run(runs, "denied", status="finished")
    denied.chmod(mode)
    monkeypatch.setenv("STEPSCOPE_RUNS", str(runs))
    with not_root():
        assert main(["runs"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert denied.name in err
        assert main(["diagnose", denied.name]) == 2
        assert str(denied) in capsys.readouterr().err
    kept = make_run(runs, "kept", status="finished")
    with not_root():
        assert main(["runs"]) == 0
        out, err = capsys.readouterr()
        assert (kept.name in out, denied.name in out, denied.name in err) == (True, False, True)
        main(["gc", "--keep-days", "0"])
    assert denied.exists()
