"""What the page shows of a connection to another host, and of a run received from there."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from dashboard.api.routes import get_series
from dashboard.services import Services
from dashboard.sources import connection_problem, connection_text, source_state
from stepscope.run import RunError, RunStatus, read_run
from tests.support.app_page import record
from tests.support.fake_source import CONNECTED, LOST, FakeSource


def poll(run: str) -> dict[str, Any]:
    """Return the answer to a poll of a run."""
    query = f"run={run}".encode()
    answer = get_series(Request({"type": "http", "query_string": query, "headers": []}))
    told: dict[str, Any] = json.loads(answer.body)
    assert answer.status_code == 200, told
    return told


NOON = time.mktime((2026, 11, 21, 12, 0, 5, 0, 0, -1))


@pytest.fixture
def source(tmp_path: Path) -> FakeSource:
    return FakeSource(tmp_path / "mirror")


@pytest.fixture
def server(tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> Services:
    made = Services(tmp_path / "runs", tmp_path / "none", [tmp_path / "other"], [source])
    made.devices()
    gc.unfreeze()
    monkeypatch.setattr("dashboard.services.get", lambda: made)
    for name in ("runs", "other", "far"):
        (tmp_path / name).mkdir()
    return made


def test_the_state_of_a_connection_has_its_delay_or_the_wait_and_the_reason() -> None:
    assert connection_text(CONNECTED) == "connected · 34 ms"
    soon = time.monotonic() + 7.5
    assert connection_text(replace(LOST, retry_at=soon)) == "reconnecting in 8 s"
    assert connection_text(replace(LOST, retry_at=soon, delay_s=None)).startswith("cannot connect")
    assert connection_text(replace(LOST, retry_at=1.0)) == "connecting…"
    assert "\x1b" not in connection_problem(replace(LOST, text="\x1b[2J"))


def test_a_lost_connection_dates_a_live_run_and_leaves_an_ended_one(
    tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    run = record(tmp_path / "far", "one", RunStatus.RUNNING)
    received = read_run(source.receive(run, "rank0.sqlite", received=NOON))
    live = replace(received, status=RunStatus.RUNNING)
    connected = source_state(source, live)
    assert (connected["connected"], connected["note"], connected["lost"]) == (True, None, None)
    source.now = LOST
    monkeypatch.setattr(time, "time", lambda: NOON + 60)
    today, localtime = time.localtime(NOON + 60), time.localtime
    monkeypatch.setattr(time, "localtime", lambda at=None: today if at is None else localtime(at))
    assert "as of 12:00:05" in source_state(source, live)["lost"]
    assert source_state(source, replace(live, status=RunStatus.FINISHED))["lost"] is None
    today = time.localtime(NOON + 86_400)
    assert "21 Nov 12:00:05" in source_state(source, live)["lost"]


def test_the_runs_of_all_folders_are_one_list_and_the_first_folder_has_an_id(
    tmp_path: Path, server: Services, source: FakeSource
) -> None:
    for folder, name in (("other", "a"), ("far", "b"), ("far", "c")):
        record(tmp_path / folder, name)
    for name in "bc":
        source.receive(tmp_path / "far" / name)
    record(server.runs, "c")
    found = {run.id: run for run in server.run_list.fresh().runs}
    for name, root in {"a": tmp_path / "other", "b": source.folder, "c": server.runs}.items():
        assert found[name].folder == server.folder(name) == root / name
    assert [server.source_of(found[name]) for name in "abc"] == [None, source, None]
    for name in ("absent", "../far/b"):
        with pytest.raises(RunError):
            server.folder(name)


def test_a_poll_loads_an_old_run_and_shows_it_once_it_is_there(
    tmp_path: Path, server: Services, source: FakeSource
) -> None:
    run = record(tmp_path / "far", "old")
    source.receive(run)
    waiting = poll("old")
    assert source.wanted == ["old"]
    assert waiting["series"] == {}
    assert waiting["source"]["note"]
    (old,) = server.run_list.rows()
    assert old.cells["Best loss"] == 1.0, "run.json of an ended run has it"
    source.now = LOST
    source.receive(run, "rank0.sqlite")
    loaded = poll("old")
    assert loaded["source"]["note"] is loaded["source"]["lost"] is None
    assert loaded["page_token"] != waiting["page_token"], "the page draws the rest of the tab"
