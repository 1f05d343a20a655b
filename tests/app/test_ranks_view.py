"""The page of a distributed run: its tab, the details of each rank, its row in Runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.run_analyzer import RunFindings
from dashboard.services import Services
from stepscope.run import RunKind, RunStatus
from stepscope.store.recorder import Recorder
from tests.support.app_page import OpenPage, header


@pytest.fixture
def job(server: Services) -> Path:
    """A recorded run of two ranks of four; the others never wrote a file."""
    folder = server.runs / "job"
    folder.mkdir()
    for rank in range(2):
        recorder = Recorder(folder, name="train", kind=RunKind.WATCH, rank=rank)
        recorder.describe(rank=rank, world_size=4, device="cpu", script={"path": "train.py"})
        recorder.log(1, {"train/loss": 1.0})
        recorder.close(RunStatus.FINISHED)
    (folder / "output.log").write_text("first\n")
    (folder / "output.rank1.log").write_text("second <b>x</b>\n")
    return folder


def describe(folder: Path, **run_info: Any) -> None:
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(known | run_info))


def codes(app: AppTest) -> list[str]:
    return [code.value for code in app.code]


def export(app: AppTest) -> list[str]:
    """Return the words of the command that exports the rank."""
    (command,) = [code for code in codes(app) if code.startswith("stepscope ")]
    return shlex.split(command)


def test_only_a_distributed_run_has_the_tab_ranks(page: OpenPage, job: Path) -> None:
    assert "ranks" in dict(header(page(run="job"))["tabs"])
    for size in (1, "4", 10**12):
        describe(job, world_size=size)
        shown = header(page(run="job", tab="ranks"))
        assert "ranks" not in dict(shown["tabs"])
        assert shown["tab"] == "overview"


def test_the_ranks_are_a_table_and_the_straggler_is_first(
    page: OpenPage, job: Path, server: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page(run="job", tab="ranks")
    assert [app.dataframe[0].value[name].tolist() for name in ("Rank", "Status", "Last step")] == [
        [0, 1, 2, 3],
        ["finished", "finished", "never started", "never started"],
        [1, 1, pytest.approx(float("nan"), nan_ok=True), pytest.approx(float("nan"), nan_ok=True)],
    ]
    late = {"kind": "straggler", "text": "Rank 1 is late.", "ranks": [1], "words": "Look."}
    monkeypatch.setattr(server.findings, "of", lambda run: RunFindings(late, late))
    app.run()
    assert app.dataframe[0].value["Rank"].tolist() == [1, 0, 2, 3]
    assert "Rank 1 is late" in app.warning[0].value


def test_each_rank_has_its_output_settings_and_export(page: OpenPage, job: Path) -> None:
    app = page(run="job", tab="ranks")
    picker = app.selectbox(key="rank_details")
    assert [option.split(" · ")[0] for option in picker.options] == ["Rank 0", "Rank 1"]
    picker.select_index(1).run()
    assert "second <b>x</b>" in codes(app)
    assert "first" not in codes(app)
    assert export(app)[-2:] == ["--rank", "1"]
    assert json.loads(app.json[0].value)["rank"] == 1
    (job / "rank1.json").write_text("[1, 2")
    app = page(run="job", tab="ranks")
    app.selectbox(key="rank_details").select_index(1).run()
    assert not app.exception
    assert not app.json
