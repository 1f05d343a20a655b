"""The console command: what it lists and hands on, how it ends, and that docs/cli.md tells it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from stepscope.cli import BROKEN_PIPE, COMMANDS, main, parser, ui
from tests.support.run_folders import make_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all runs."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    return tmp_path


# --- runs -----------------------------------------------------------------------------------------


def test_runs_skips_the_unreadable_and_says_when_there_are_none(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs"]) == 0
    assert "STEPSCOPE_RUNS" in capsys.readouterr().out
    make_run(runs, "first", status="finished", step=7)
    (make_run(runs, "torn") / "run.json").write_text("{")
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert "finished" in out
    assert len(out.splitlines()) == 1
    assert "not a Stepscope run" in err


def test_live_runs_come_first_then_the_newest(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in [("a", "running"), ("b", "finished"), ("c", "failed")]:
        os.rename(make_run(runs, name, status=status), runs / f"2026-{name}")
    assert main(["runs"]) == 0
    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ids == ["2026-a", "2026-c", "2026-b"]


def test_a_line_tells_kind_step_duration_and_a_foreign_owner(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(runs, "mine", status="finished", kind="watch", step=12, created=1e9, ended=1e9 + 125)
    make_run(runs, "theirs", status="failed", host="node7", user="ada", created=1e9, ended=1e9 + 5)
    assert main(["runs"]) == 0
    theirs, mine = capsys.readouterr().out.splitlines()
    assert re.search(r"watch +finished +step +12 +2001-09-0\d \d\d:\d\d +2 min 05 s$", mine)
    assert theirs.endswith("5 s  ada@node7")
    assert "trainer" in theirs


def test_a_crashed_run_lasted_until_its_last_heartbeat(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(runs, pid=2**22 + 1, created=1e9, heartbeat=1e9 + 7)
    assert main(["runs"]) == 0
    assert re.search(r"crashed .* 7 s$", capsys.readouterr().out.strip())


def test_runs_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    make_run(runs, "live", created=time.time() - 60, step=3)
    make_run(runs, "odd", status="finished", created=1e9, step=float("inf"), ended=10**400)
    make_run(runs, "undated", created=float("nan"))
    assert main(["runs", "--json"]) == 0
    said = capsys.readouterr()
    assert "undated" in said.err
    live, odd = json.loads(said.out, parse_constant=pytest.fail)
    assert (live["status"], live["step"], live["ended"], live["read_only"]) == (
        "running",
        3,
        None,
        False,
    )
    assert live["duration_s"] >= 60
    assert (odd["created"], odd["step"]) == (1e9, 0)


def test_a_name_from_a_shared_folder_cannot_steer_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(runs, status="finished", created=1e9, ended=2e9, host="\x1b[2Jnode\n", step=[1])
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 1


# --- how it begins and ends -----------------------------------------------------------------------


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("stepscope")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("stepscope ")


def test_listing_runs_loads_neither_numpy_nor_torch(runs: Path) -> None:
    code = "import sys; from stepscope.cli import main; main(['runs']); print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in found.stdout.split()}
    assert not loaded & {"numpy", "torch", "sqlite3", "pynvml", "streamlit"}


def test_a_reader_that_goes_away_ends_it_quietly(runs: Path) -> None:
    make_run(runs)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "stepscope.cli", "runs"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, b"")


def test_all_that_follows_watch_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def watch(arguments: list[str]) -> int:
        seen.append(arguments)
        return 5

    monkeypatch.setitem(sys.modules, "stepscope.watch.main", types.SimpleNamespace(main=watch))
    words = ["--name", "x", "train.py", "--help", "--", "-v"]
    assert main(["watch", *words]) == 5
    assert seen == [words]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["record", "--seconds", "0"],
        ["record", "--seconds", "inf"],
        ["record", "--period", "0.001"],
        ["export", "x", "--format", "xml"],
        ["export", "x", "--format", "csv", "--rank", "-1"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: stepscope" in capsys.readouterr().err


# --- ui -------------------------------------------------------------------------------------------


def test_ui_becomes_streamlit_on_the_callers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[str, list[str], dict[str, str], str]] = []
    monkeypatch.setattr(
        os, "execve", lambda path, words, env: became.append((path, words, env, os.getcwd()))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_RUNS", "mine")
    main(["ui", "--", "--server.port", "8600"])
    ((path, words, environment, folder),) = became
    assert path == sys.executable
    assert words[1:] == ["-m", "streamlit", "run", "app.py", "--server.port", "8600"]
    assert environment["STEPSCOPE_RUNS"] == str(tmp_path / "mine")
    assert (Path(folder) / "app.py").is_file()


def test_ui_without_the_page_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = argparse.Namespace(arguments=[])
    assert ui.run(nothing, tmp_path, project=tmp_path) == 1
    assert "not part of this installation" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ui.run(nothing, tmp_path) == 1
    assert "requirements.txt" in capsys.readouterr().err


# --- the document ---------------------------------------------------------------------------------


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, with its options."""
    (found,) = [
        action for action in parser(name)._actions if isinstance(action, argparse._SubParsersAction)
    ]
    choice: argparse.ArgumentParser = found.choices[name]
    return choice


def sections() -> dict[str, str]:
    """Return each command's section of docs/cli.md."""
    parts = re.split(r"^## stepscope ([\w-]+)$", (ROOT / "docs/cli.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_and_option_is_documented() -> None:
    documented = sections()
    assert set(documented) == set(COMMANDS)
    for name in COMMANDS:
        for action in command_parser(name)._actions:
            long = [option for option in action.option_strings if option.startswith("--")]
            if long and long != ["--help"]:
                assert f"`{long[0]}" in documented[name], f"{name} {long[0]}"


def test_every_documented_option_exists() -> None:
    for name, text in sections().items():
        actions = command_parser(name)._actions
        known = {word for action in actions for word in action.option_strings}
        if name != "watch":
            assert set(re.findall(r"^\| `(--\w+)", text, flags=re.M)) <= known


def test_the_options_of_watch_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--help"])
    options = set(re.findall(r"^  (--?\w+)", capsys.readouterr().out, flags=re.M)) - {"-h"}
    assert options
    assert all(f"`{option}" in sections()["watch"] for option in options)


def test_every_command_has_examples_in_its_help() -> None:
    for name in COMMANDS.keys() - {"watch"}:
        assert f"stepscope {name}" in str(command_parser(name).epilog)
