"""The Run page of runs of other processes: watched scripts, recordings, runs of other users."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.store.recorder import CommandName, Recorder
from tests.support.app_page import (
    OpenPage,
    component,
    header,
    text_of,
    trigger,
)

Begin = Callable[..., Recorder]
ABSENT = (CommandName.SAVE_CHECKPOINT, CommandName.MEMORY_SNAPSHOT)
SCRIPT = {"path": "/home/me/train.py", "arguments": ["--lr", "0.1"], "cwd": "/home/me"}
WATCHED = {
    "kind": RunKind.WATCH,
    "device": "cpu",
    "optimizers": ["Adam"],
    "commands": [str(name) for name in CommandName if name not in ABSENT],
    "script": SCRIPT,
}


@pytest.fixture
def begin(server: services.Services) -> Begin:
    """Begin runs that count as live until a test writes otherwise."""

    def start(name: str, status: RunStatus = RunStatus.RUNNING, **run_info: Any) -> Recorder:
        (server.runs / name).mkdir()
        recorder = Recorder(server.runs / name, name="train")
        recorder.describe(**{**WATCHED, **run_info})
        recorder.set_status(status)
        recorder.log(1, {"train/loss": 1.0})
        recorder.close(status)
        write(recorder.folder, status=status, ended=None)
        return recorder

    return start


def write(folder: Path, **run_info: Any) -> None:
    """Change run.json as its writer would."""
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(known | run_info))


def buttons(app: AppTest) -> set[str]:
    """The labels of the buttons that can be pressed now."""
    folder = services.get().folder(component(app)["run"])
    status = str(read_run(folder).status)
    told = header(app)["buttons"]
    return {each["label"] for each in told if each["when"].get(status, "not drawn") is None}


def test_an_empty_page_takes_the_run_that_begins_unless_emptied_by_hand(
    page: OpenPage, begin: Begin
) -> None:
    app = page()
    first = component(app)["page_token"]
    begin("one")
    app.run()  # as the component in the browser does for another page_token
    assert component(app)["page_token"] != first
    memory = {"Empty cache", "Reset peak stats", "Collect garbage"}
    assert buttons(app) == {"Pause", "Stop", "Profile…", "Mark"} | memory
    trigger(app, "run", "")
    assert component(app)["run"] is None
    app.run()
    assert component(app)["run"] is None


def test_the_selection_stays_when_its_run_ends_or_is_of_another_host(
    page: OpenPage, begin: Begin
) -> None:
    folders = [begin(name).folder for name in ("one", "two")]
    app = page(run="one")
    write(folders[0], status="finished", ended=2e9)
    app.run()
    (_, first), (last, second) = header(app)["runs"]
    assert component(app)["run"] == last == "one"
    trigger(app, "run", "two")
    assert component(app)["run"] == "two"
    trigger(app, "run", "../etc")  # no choice of the list
    assert component(app)["run"] == "two"
    write(folders[1], user="eve")
    app.run()
    assert buttons(app) == set()
    assert "eve" in header(app)["look_only"]


def test_a_scripts_logs_and_details(page: OpenPage, begin: Begin) -> None:
    folder = begin("one", world_size=4).folder
    (folder / "output.log").write_text("  0%\r100%\n\x1b[31mred\x1b[0m <b>x</b>\n")
    (folder / "traceback.txt").write_text("boom")
    (folder / "last.pt").write_bytes(b"x")
    write(folder, status="failed", environment={"cuda": None, "cores": 8})
    app = page(run="one", tab="logs")
    codes = [code.value for code in app.code]
    assert "boom" in codes
    assert ["100%", "red <b>x</b>"] in [code.splitlines() for code in codes]
    app = page(run="one", tab="details")
    codes = [code.value for code in app.code]
    assert list(app.dataframe[0].value["Value"]) == ["n/a", "8"]
    assert not [button.label for button in app.button if button.label.startswith("Resume")]


def test_the_traceback_is_that_of_the_rank_that_failed_first(page: OpenPage, begin: Begin) -> None:
    folder = begin("one", world_size=2).folder
    failed = json.loads((folder / "run.json").read_text())
    failed |= {"status": "failed", "reason": "ValueError: no", "ended": 1e9}
    failed["rank"] = 9  # the global rank, on a second machine another number
    (folder / "rank1.json").write_text(json.dumps(failed))
    closed = "Connection closed by peer"
    (folder / "traceback.txt").write_text(closed)
    (folder / "traceback.rank1.txt").write_text("ValueError: no")
    write(folder, status="failed", reason=f"RuntimeError: {closed}", ended=2e9)
    app = page(run="one", tab="logs")
    codes = [code.value for code in app.code]
    assert "ValueError: no" in codes
    assert closed not in codes
    assert any(box.label.endswith("rank 9") for box in app.expander)


def test_details_list_the_settings_of_a_script(page: OpenPage, begin: Begin) -> None:
    place = {"file": "train.py", "line": 3}
    entry = {"name": "fused", "value": True, "lines": ["Adam(..., fused=True)"], "places": [place]}
    entries = [
        {**entry, "state": "in effect", "text": "2 of 2 steps"},
        {**entry, "name": "tf32", "state": "refused", "text": "No GPU.", "places": []},
    ]
    begin("script", RunStatus.FINISHED, settings=entries)
    app = page(run="script", tab="details")
    for entry in entries:
        assert entry["text"] in text_of(app)
    assert "Adam(..., fused=True)" in [one.value for one in app.code]
