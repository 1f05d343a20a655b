"""The console command: listing of runs, exit codes, the dashboard, and docs/cli.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dashboard.arguments import take_arguments
from dashboard.run_rows import cells_of
from stepscope.cli import BROKEN_PIPE, COMMANDS, OWN_PARSERS, main, parser
from stepscope.recorded_run import open_run
from stepscope.run import RunError, read_run
from tests.support.child_process import child
from tests.support.run_folders import make_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all runs."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    return tmp_path


def test_runs_omits_unreadable_folders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    make_run(runs, "first", created=time.time() - 60, step=3)
    (make_run(runs, "torn") / "run.json").write_text("{")
    assert main(["runs", "--json"]) == 0
    out, err = capsys.readouterr()
    (run,) = json.loads(out)
    expected = {"status": "running", "step": 3, "ended": None, "read_only": False}
    assert run.items() >= expected.items()
    assert run["duration_s"] >= 60
    assert "not a Stepscope run" in err


def test_runs_lists_live_runs_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    past = {"created": 1e9, "ended": 1e9 + 125}
    for name, about in {
        "a": {"status": "running"},
        "c": {"status": "failed", "host": "node7", "user": "ada", "tags": ["x", "y"], **past},
        "d": {"pid": 2**22 + 1, "created": 1e9 - 9, "heartbeat": 1e9 - 2},
        "e": {"status": "finished", "host": "\x1b[2Jnode\n", "step": [1], **past},
    }.items():
        os.rename(make_run(runs, name, **about), runs / f"2026-{name}")
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # a name of an untrusted folder cannot control the terminal
    lines = {line.split()[0][5:]: line for line in out.splitlines()}
    assert list(lines) == ["a", "e", "c", "d"]
    assert re.search(r"trainer .*2 min 05 s  #x  #y  ada@node7$", lines["c"])
    assert re.search(r"crashed .* 7 s$", lines["d"])  # up to its last heartbeat


@pytest.mark.parametrize(
    ("status", "key", "shown"),
    [
        ("finished", "train/loss", "nan"),
        ("finished", "train/loss.optimizer1", "nan"),
        ("finished", "val/score", "finished"),
        ("failed", "train/loss", "failed"),
    ],
)
def test_a_run_whose_last_loss_is_not_finite_is_nan(
    runs: Path, capsys: pytest.CaptureFixture[str], status: str, key: str, shown: str
) -> None:
    final = {"train/loss": {"last": 0.5, "best": 0.5}} | {key: {"last": None, "best": 0.25}}
    folder = make_run(runs, "a", status=status, ended=time.time(), final=final, totals={})
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == shown
    assert cells_of(read_run(folder), None)["Status"] == shown


def test_a_part_of_an_id_opens_the_only_run_that_has_it(runs: Path) -> None:
    for name in ("20261126-train-0a1b", "20261126-train-0a1c", "abcd"):
        os.rename(make_run(runs, "x"), runs / name)
    assert open_run("0a1c").id == "20261126-train-0a1c"
    assert open_run("abcd").id == "abcd"
    with pytest.raises(RunError, match="20261126-train-0a1c and 20261126-train-0a1b"):
        open_run("train")
    os.rename(make_run(runs, "x"), runs / "20261126-base-10-0a1bcdef")
    assert open_run("base-10").id == open_run("0a1bc").id == "20261126-base-10-0a1bcdef"
    assert open_run("se-1").id == "20261126-base-10-0a1bcdef"
    for unknown in ("0a1d", "0a1", "../abcd", "rain", "1126", ""):
        with pytest.raises(RunError):
            open_run(unknown)


def test_the_command_is_installed_and_runs_loads_no_large_library(runs: Path) -> None:
    command = Path(sys.executable).with_name("stepscope")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("stepscope ")
    loaded = child(
        "import sys; from stepscope.cli import main; main(['runs']); print(*sys.modules)"
    )
    names = {name.partition(".")[0] for name in loaded.split()}
    assert not names & {"numpy", "torch", "sqlite3", "pynvml", "streamlit"}


def test_a_broken_pipe_ends_it_quietly(runs: Path) -> None:
    make_run(runs)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stepscope.cli", "runs"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        "nope",
        "devices --watch 0",
        "export x --format csv --rank -1",
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert "usage: stepscope" in capsys.readouterr().err


def test_ui_becomes_streamlit_on_the_callers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[str, list[str], dict[str, str], str]] = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append((*call, os.getcwd())))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_RUNS", "mine")
    monkeypatch.setenv("STEPSCOPE_ALERTS", "my.toml")
    monkeypatch.delenv("STEPSCOPE_DATA", raising=False)
    monkeypatch.setenv("STEPSCOPE_WORKLOAD", "other.py:build")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("src", "", "/theirs")))
    given = ["--port", "8600", "--no-browser", "--workload", "my.py:build", "--", "--x", "1"]
    main(["ui", *given])
    ((path, words, environment, folder),) = became
    assert path == sys.executable
    assert words[1:5] == ["-m", "streamlit", "run", "app.py"]
    options = ["--server.port", "8600", "--server.headless", "true", "--x", "1"]
    assert words[5:] == [*options, "--", "--workload", str(tmp_path / "my.py:build")]
    assert environment["STEPSCOPE_RUNS"] == str(tmp_path / "mine")
    assert environment["STEPSCOPE_DATA"] == str(tmp_path / "data")
    assert environment["STEPSCOPE_ALERTS"] == str(tmp_path / "my.toml")
    assert environment["STEPSCOPE_WORKLOAD"] == str(tmp_path / "other.py:build")
    assert environment["PYTHONPATH"] == os.pathsep.join((str(tmp_path / "src"), "/theirs"))
    assert (Path(folder) / "app.py").is_file()


def test_a_missing_package_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words, packages in (
        (["ui"], "streamlit plotly"),
        (["demo", "--no-browser"], "streamlit plotly"),
        (["lab", "--list"], "torch scipy"),
        (["sample-data"], "scikit-learn pillow"),
    ):
        assert main(words) == 1
        assert packages in capsys.readouterr().err


def test_ui_takes_sources_of_the_environment_relative_to_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[str] = []
    monkeypatch.setattr(os, "execve", lambda *call: became.append(call[2]["STEPSCOPE_SOURCES"]))
    (tmp_path / "runs2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_SOURCES", '["runs2", "ssh://login1/runs"]')
    main(["ui"])
    assert json.loads(became[0]) == [str(tmp_path / "runs2"), "ssh://login1/runs"]


@pytest.mark.parametrize("sources", ['["runs2"]', '["ftp://login1/runs"]', "runs2", "[1]"])
def test_invalid_sources_of_the_environment_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sources: str
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("became the server"))
    monkeypatch.setenv("STEPSCOPE_SOURCES", sources)
    monkeypatch.setenv("STEPSCOPE_DATA", "data")  # take_arguments() makes it absolute
    assert main(["ui"]) == 2
    from_ui = capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        take_arguments(["app.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == from_ui
    assert from_ui.count("\n") == 1


def test_demo_opens_no_page_of_another_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROWSER", "false")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("would open a page"))
    monkeypatch.setattr(os, "execve", lambda *call: pytest.fail("would start a server"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 1
    assert f"{port} is in use" in capsys.readouterr().err


def test_the_document_has_every_command_and_option() -> None:
    parts = re.split(r"^## stepscope ([\w-]+)$", (ROOT / "docs/cli.md").read_text(), flags=re.M)
    documented = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(documented) == set(COMMANDS)
    for name in COMMANDS.keys() - OWN_PARSERS.keys():
        (commands,) = (
            action
            for action in parser(name)._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        command = commands.choices[name]
        known = {word for action in command._actions for word in action.option_strings}
        listed = set(re.findall(r"^\| `(--[\w-]+)", documented[name], flags=re.M))
        assert listed == {word for word in known if word.startswith("--")} - {"--help"}, name
