"""The pages with runs of other hosts and of further folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard import services
from stepscope.run import RunStatus
from tests.support.app_page import OpenPage, at_address, header, label, record, text_of
from tests.support.fake_source import LABEL, LOST, FakeSource


@pytest.fixture
def source(tmp_path: Path) -> FakeSource:
    return FakeSource(tmp_path / "mirror")


@pytest.fixture
def sources(tmp_path: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local folders `runs` and `other`, and one remote source, which the server closes."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "runs"))
    given = ["ssh://far/runs", tmp_path / "other"]
    monkeypatch.setattr(services, "sources_from_environment", lambda: given)
    monkeypatch.setattr(services, "RemoteSource", lambda _address: source)
    for name in ("runs", "other", "far"):
        (tmp_path / name).mkdir()
    yield
    assert not source.open


def test_the_runs_page_names_each_source_and_the_state_of_its_connection(
    page: OpenPage, server: services.Services, source: FakeSource, tmp_path: Path
) -> None:
    assert source.open
    app = at_address(page, "runs")
    assert LABEL.replace(":", "\\:") in text_of(app)
    source.receive(record(tmp_path / "far", "remote"))
    record(tmp_path / "other", "other")
    record(server.runs, "local")
    source.now = LOST
    app.run()
    assert "reconnecting" in text_of(app)
    table = app.dataframe[0].value
    sources = {None if value != value else value for value in table["Source"]}
    assert sources == {None, LABEL, str(tmp_path / "other")}


def test_the_run_page_of_a_remote_run_names_its_source_and_starts_runs_here(
    page: OpenPage, server: services.Services, source: FakeSource, tmp_path: Path
) -> None:
    source.receive(record(tmp_path / "far", "remote", RunStatus.FAILED))
    record(tmp_path / "other", "other")
    app = page(run="remote")
    runs = dict(header(app)["runs"])
    assert runs["remote"].endswith(f" · {LABEL}")
    for tab in ("memory", "profile", "logs", "details"):
        page(run="remote", tab=tab)


def test_a_run_of_another_folder_is_resumed_nowhere(
    page: OpenPage, server: services.Services, tmp_path: Path
) -> None:
    folder = record(tmp_path / "other", "one")
    (folder / "last.pt").write_bytes(b"x")
    app = page(run="one", tab="details")
    resume = label(app, "button", "Resume in a new run")
    assert resume.disabled
    assert str(server.runs) in resume.help
    assert any(str(folder) in code.value for code in app.code), "the command to export it"
