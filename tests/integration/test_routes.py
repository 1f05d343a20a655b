"""The app's own routes answer from run folders, refuse strangers, and say what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from starlette.testclient import TestClient

from dashboard import live_chart, services
from dashboard.controls.actions import END_NOW_S
from dashboard.crash_watch import CrashWatch
from dashboard.run_list import RunList
from stepscope.run import RunStatus, process_identity, read_run
from stepscope.store import STORE_NAME
from stepscope.store.schema import SCHEMA_VERSION
from tests.support.breakdown_rows import cuda_run
from tests.support.child_process import holding
from tests.support.commanded_runs import asked, live_run, write
from tests.support.hostile_folders import record
from tests.support.recorded_runs import recorded_run
from tests.support.run_folders import killed_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in ("one", "corrupt", "damaged", "newer"):
        record(root / name)
    with closing(sqlite3.connect(root / "newer" / STORE_NAME)) as store:
        store.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    cuda_run(root / "cuda")
    (root / "corrupt" / "run.json").write_text("{}")
    (root / "damaged" / "rank0.sqlite").write_bytes(b"x" * 5000)
    return root


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    """One client for all tests: an st.App starts only once a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_RUNS", str(runs))
        st.cache_resource.clear()
        served = importlib.import_module("app")
        as_owner = {"Authorization": f"Bearer {served.TOKEN}"}
        with TestClient(served.app, base_url="http://localhost", headers=as_owner) as client:
            # The client's app has threads of its own that look for devices: let them end.
            services.get().devices()
            yield client
        st.cache_resource.clear()


def test_a_run_is_served_and_then_only_what_is_new(client: TestClient) -> None:
    first = client.get("/api/series", params={"run": "one"})
    assert first.status_code == 200
    assert first.headers["cache-control"] == "no-store"
    body = first.json()
    assert body["status"] == "finished"
    assert body["series"]["steps"]["end"] == 20
    (event,) = body["events"]
    again = client.get(
        "/api/series", params={"run": "one", "since": "steps~20~1", "events": event["id"]}
    ).json()
    assert again["series"]["steps"]["t"] == []
    assert again["events"] == []
    window = client.get(
        "/api/window", params={"run": "one", "axis": "step", "from": 5, "to": 6}
    ).json()
    assert window["series"]["steps"]["s"] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/api/series?run=", 404, "name"),
        ("/api/series?run=../etc", 404, "name"),
        ("/api/series?run=absent", 404, "stepscope runs"),
        ("/api/series?run=one&since=x", 400, "SERIES~ROW~BUCKET"),
        ("/api/series?run=one&events=-1", 400, "event id"),
        ("/api/window?run=one&axis=step&from=nan&to=1", 400, "finite"),
        ("/api/window?run=one&axis=step&from=0", 400, "finite|convert"),
        ("/api/series?run=corrupt", 404, "Stepscope run"),
        ("/api/series?run=damaged", 422, "not a usable"),
        ("/api/series?run=newer", 422, "Use the Stepscope"),
    ],
)
def test_a_wrong_request_is_answered_in_a_sentence(
    client: TestClient, path: str, status: int, word: str
) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert any(part in answer.json()["error"] for part in word.split("|"))


def test_the_server_stores_the_last_rows_of_a_killed_run_and_no_answer_writes(
    client: TestClient, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "alerts.toml"  # an alert of the crash would store them as well
    rules.write_text("[rules.run_failed]\nenabled = false\n")
    monkeypatch.setenv("STEPSCOPE_ALERTS", str(rules))
    folder = runs / "killed"
    folder.mkdir()
    told = killed_run(folder)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("*[!m]")}  # without -shm

    before = files()
    body = client.get("/api/series", params={"run": "killed"}).json()
    assert (body["status"], files()) == ("crashed", before)
    CrashWatch(RunList(runs)).check_runs()
    body = client.get("/api/series", params={"run": "killed"}).json()
    assert body["progress"]["step"] >= told
    assert body["series"]["steps"]["end"] == body["progress"]["step"]
    assert not (folder / "rank0.ring").exists()


def test_the_answer_has_the_diagnosis_of_the_run(client: TestClient, runs: Path) -> None:
    recorded_run(runs, "input_bound_cpu")
    body = client.get("/api/series", params={"run": "input_bound_cpu"}).json()
    assert "num_workers" in body["verdict"]["words"]
    assert len(json.dumps(body["verdict"])) < 400, "twice a second"


def test_a_foreign_host_and_an_unknown_route_are_refused(client: TestClient) -> None:
    answer = client.get("/api/series?run=one", headers={"host": "evil.example"})
    assert answer.status_code == 400
    assert client.get("/api/absent").status_code == 404


def test_plotly_comes_gzipped(client: TestClient) -> None:
    answer = client.get(live_chart.PLOTLY_URL)
    assert answer.headers["content-encoding"] == "gzip"
    assert b"plotly.js (cartesian - minified) v4.1.1\n" in answer.content[:200]
    assert int(answer.headers["content-length"]) < 600_000


@pytest.mark.parametrize("status", [RunStatus.PENDING, RunStatus.RUNNING])
def test_a_store_that_is_being_made_is_no_damaged_one(
    client: TestClient, runs: Path, status: RunStatus
) -> None:
    folder = live_run(runs / f"new-{status}")
    write(folder, status=status)
    (folder / STORE_NAME).write_bytes(b"")  # as SQLite leaves it before the first write
    answer = client.get("/api/series", params={"run": folder.name})
    assert answer.status_code == (200 if status is RunStatus.PENDING else 422)
    assert "status" in answer.json() or "store" in answer.json()["error"]


OWN_ORIGIN = {"Origin": "http://localhost"}


def press(client: TestClient, run: str, name: str, number: int = 1, **more: Any) -> Any:
    body = {"run": run, "name": name, "args": {}, "id": number} | more
    return client.post("/api/command", json=body, headers=OWN_ORIGIN)


def test_a_button_becomes_a_command_in_the_run_folder(client: TestClient, runs: Path) -> None:
    folder = live_run(runs / "live")
    assert press(client, "live", "pause", 7).json() == {"said": None}
    assert press(client, "live", "mark", 8, args={"text": " <b> "}).status_code == 200
    assert press(client, "live", "mark", 9, args={"text": ""}).status_code == 200
    marks = [(8, "mark", '{"text": "<b>"}'), (9, "mark", '{"text": "marked"}')]
    assert asked(folder) == [(7, "pause", "{}"), *marks]
    again = press(client, "live", "pause", 7)  # the id is taken
    assert (again.status_code, len(asked(folder))) == (422, 3)


@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        ({"run": "absent"}, 404, "stepscope runs"),
        ({"run": "../etc"}, 404, "name"),
        ({"run": 3}, 400, ".run"),
        ({"name": "rm"}, 400, "rm"),
        ({"id": 2**60}, 400, ".id"),
        ({"name": "mark", "args": {"text": "x" * 201}}, 400, "200"),
        ({"run": "one"}, 403, "ended"),
        ({"run": "theirs"}, 403, "user eve"),
        ({"name": "save_checkpoint"}, 403, "Save checkpoint"),
        ({"name": "profile", "args": {"steps": 51}}, 400, ".steps"),
        ({"name": "memory_snapshot", "args": {"steps": 3}}, 403, "support"),
    ],
)
def test_a_command_that_cannot_be_sent_is_refused_in_a_sentence(
    client: TestClient, runs: Path, changed: dict[str, Any], status: int, word: str
) -> None:
    for name, more in (("quiet", {}), ("theirs", {"user": "eve"})):
        if not (runs / name).exists():
            live_run(runs / name, **more)
    answer = press(client, **{"run": "quiet", "name": "stop", **changed})
    assert answer.status_code == status
    assert word in answer.json()["error"]
    assert asked(runs / "quiet") == asked(runs / "theirs") == []


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://localhost:9"])
def test_a_foreign_page_cannot_press_a_button(
    client: TestClient, runs: Path, origin: str | None
) -> None:
    folder = runs / "guarded"
    if not folder.exists():
        live_run(folder)
    body = json.dumps({"run": "guarded", "name": "stop", "args": {}, "id": 1})
    foreign = {} if origin is None else {"Origin": origin}
    answer = client.post("/api/command", content=body, headers=foreign)
    assert answer.status_code == 403
    assert "Origin" in answer.json()["error"]
    assert asked(folder) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"a":' * 100_000])
def test_a_body_that_is_no_command_is_refused(client: TestClient, text: str) -> None:
    answer = client.post("/api/command", content=text, headers=OWN_ORIGIN)
    assert (answer.status_code, set(answer.json())) == (400, {"error"})


def test_force_stop_ends_a_script_that_hears_no_stop(client: TestClient, runs: Path) -> None:
    folder = live_run(runs / "deaf")
    with holding(folder / STORE_NAME) as script:
        about: dict[str, Any] = process_identity(script.pid) | {"kind": "watch"}
        write(folder, **about, heartbeat=time.time())
        assert press(client, "deaf", "end_now", 1).status_code == 403
        assert script.poll() is None
        silent = time.time() - 2 * END_NOW_S
        write(folder, **about, heartbeat=silent)
        os.utime(folder / "run.json", (silent, silent))
        assert "1 process" in press(client, "deaf", "end_now", 2).json()["said"]
        script.wait(10)
    assert read_run(folder).status is RunStatus.STOPPED


def test_a_module_of_the_live_chart_is_kept_by_its_version(client: TestClient) -> None:
    folder = live_chart.MODULES_PATH.format(version=live_chart.VERSION, name="")
    answer = client.get(f"{folder}live.js")
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/javascript")
    assert client.get(f"{folder}absent.js").status_code == 404
    assert client.get(f"{folder}__init__.py").status_code == 404
    assert client.get("/vendor/live/0000/live.js").status_code == 404
