"""Rows of all runs: ended ones are read once, the file in the folder can always be rebuilt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dashboard import run_catalog
from dashboard.run_catalog import CATALOG, RunCatalog, hint, matching
from stepscope.run import process_identity, write_run_json
from stepscope.run.metadata import edit_notes

LONG_AGO = 1_000.0


def write(root: Path, name: str, **run_json: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    known = {"name": name, "status": "finished", "created": 1.0, "heartbeat": 1.0, "ended": 61.0}
    final = {"train/loss": {"last": 0.5, "best": 0.25}}
    values = {"final": final, "totals": {"steps": 10}}
    write_run_json(folder, known | process_identity() | values | run_json)
    os.utime(folder, (LONG_AGO, LONG_AGO))  # recent times are not trusted
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the run folders that are read."""
    seen: list[str] = []
    read_run = run_catalog.read_run
    monkeypatch.setattr(
        run_catalog, "read_run", lambda folder: seen.append(folder.name) or read_run(folder)
    )
    monkeypatch.setattr(run_catalog, "MAX_UNSAVED", 3)
    monkeypatch.setattr(run_catalog, "REREAD_S", 0.0)
    return seen


def test_ended_runs_are_read_once_and_changed_ones_again(tmp_path: Path, reads: list[str]) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, config={"lr": 0.1})
    write(tmp_path, "live", status="running", heartbeat=4e9, ended=None)
    catalog = RunCatalog(tmp_path)
    assert {row.id for row in catalog.rows(check=True)} == {"a", "b", "c", "live"}
    catalog.rows(check=True)
    assert sorted(reads) == ["a", "b", "c", "live", "live"]
    reads.clear()
    again = RunCatalog(tmp_path)  # of another server
    (row,) = [row for row in again.rows(check=True) if row.id == "a"]
    assert reads == ["live"], "the others are in the file"
    cells = {"config: lr": 0.1, "final: train/loss": 0.5, "best: train/loss": 0.25}
    assert row.cells.items() >= cells.items()
    assert (row.duration, row.cells["Best loss"]) == (60.0, 0.25)
    edit_notes(tmp_path / "b", name="renamed", tags=("kept",), pinned=True)
    reads.clear()
    found = {row.id: row for row in again.rows(check=True)}
    assert reads.count("b") == 1
    assert "a" not in reads
    assert (found["b"].cells["Name"], found["b"].cells["Tags"]) == ("renamed", "kept")
    assert found["b"].pinned


def test_a_run_that_begins_or_is_deleted_is_noticed(tmp_path: Path, reads: list[str]) -> None:
    catalog = RunCatalog(tmp_path / "runs")
    assert catalog.rows(check=False) == []
    (tmp_path / "runs" / "new").mkdir(parents=True)
    assert catalog.rows(check=False) == []
    write(tmp_path / "runs", "new")
    assert [row.id for row in catalog.rows(check=False)] == ["new"]
    (tmp_path / "runs" / "new").rename(tmp_path / "elsewhere")
    assert catalog.rows(check=False) == []


@pytest.mark.parametrize(
    "content", [b"", b"\x93", b"\xc1", b"\x82\xa7version\x01\xa4rows\x91\x80", b"link"]
)
def test_a_damaged_file_is_rebuilt(tmp_path: Path, reads: list[str], content: bytes) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name)
    if content == b"link":
        (tmp_path / CATALOG).symlink_to("/dev/zero")
    else:
        (tmp_path / CATALOG).write_bytes(content)
    assert len(RunCatalog(tmp_path).rows(check=False)) == 3
    reads.clear()
    assert len(RunCatalog(tmp_path).rows(check=False)) == 3
    assert reads == []


def test_an_unreadable_run_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, "good")
    (write(tmp_path, "bad") / "run.json").write_text("{")
    write(tmp_path, "odd", config={"\x1b[2J": "x", "l": [1], "n": 2**80}, tags=[{}], final=[1])
    assert {row.id for row in RunCatalog(tmp_path).rows(check=True)} == {"good", "odd"}


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", {"a", "b", "c"}),
        ("sweep", {"a", "b"}),
        ("SWEEP lr=0.1", {"a"}),
        ("lr>0.1", {"b"}),
        ("lr>=0.1 train/loss<0.4", {"b"}),
        ("best:_train/loss<=0.25", {"a", "b", "c"}),
        ("status=fail", {"c"}),
        ("tags=base", {"a"}),
        ("careful", {"b"}),
        ("none=1", set()),
        ("loss", set()),
        ("none", set()),
        ("lr=0.1", {"a"}),
        ("lr", {"a", "b"}),
        ("day=20231126", {"c"}),
        ("day=nan", set()),
        ("x=nan", {"c"}),
        ("precision=16", {"b"}),
        ("lr>x", set()),
        ("#baseline", {"a"}),
        ("config:lr=0.1", {"a"}),
        ("duration>=60 duration<61", {"a", "b", "c"}),
        ("started<1970-01-02", {"a", "b", "c"}),
        ("started>=2026-11-01", set()),
        ("model.depth=12", {"b"}),
        ("pinned=false", {"a", "b", "c"}),
        ("status=nested", set()),
        ("<>", set()),
    ],
)
def test_words_and_conditions_select_rows(tmp_path: Path, query: str, ids: set[str]) -> None:
    write(tmp_path, "a", group="sweep", config={"lr": "0.1"}, tags=["baseline"])
    loss = {"train/loss": {"last": 0.3, "best": 0.25}}
    precise = {"lr": 0.2, "precision": "fp16", "model": {"depth": 12}, "status": "nested"}
    write(tmp_path, "b", group="sweep", config=precise, note="Careful", final=loss)
    write(tmp_path, "c", status="failed", config={"day": "20231126", "x": "nan"})
    rows = RunCatalog(tmp_path).rows(check=False)
    assert {row.id for row in matching(rows, query)} == ids


def test_a_condition_that_no_run_can_satisfy_is_explained(tmp_path: Path) -> None:
    write(tmp_path, "a", config={"lr": 0.1})
    rows = RunCatalog(tmp_path).rows(check=False)
    assert hint(rows, "a lr>0.5 config:lr=0.1 duration>1") is None
    for query in ("depth>3", "lr!=0.1", "lr>", "=3"):
        assert query[:2] in str(hint(rows, query))


def test_texts_that_look_like_numbers_are_kept(tmp_path: Path) -> None:
    config = {"day": "20231126", "agent": "007", "x": "1e5", "y": "nan"}
    write(tmp_path, "a", config=config)
    (row,) = RunCatalog(tmp_path).rows(check=False)
    assert {name: row.cells[f"config: {name}"] for name in config} == config


def test_a_precision_of_another_type_breaks_neither_search_nor_cache(
    tmp_path: Path, reads: list[str]
) -> None:
    for name in "abc":
        write(tmp_path, name, config={"precision": {"a": 1}} if name == "a" else {})
    rows = RunCatalog(tmp_path).rows(check=False)
    assert matching(rows, "precision=16 precision>1") == []
    reads.clear()
    assert len(RunCatalog(tmp_path).rows(check=False)) == 3
    assert reads == [], "from the cache"


def test_a_run_that_fails_unexpectedly_hides_no_other_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "good")
    write(tmp_path, "bad")
    read_run = run_catalog.read_run

    def fail(folder: Path) -> Any:
        return 1 / 0 if folder.name == "bad" else read_run(folder)

    monkeypatch.setattr(run_catalog, "read_run", fail)
    catalog = RunCatalog(tmp_path)
    for ns in (5, 6):
        os.utime(tmp_path / "bad", ns=(ns, ns))
        assert [row.id for row in catalog.rows(check=True)] == ["good"]
    assert len(caplog.records) == 1


def test_a_crashed_run_of_another_host_is_read_again_after_a_change_only(
    tmp_path: Path, reads: list[str]
) -> None:
    folder = write(tmp_path, "far", status="running", host="elsewhere", ended=None)
    os.utime(folder / "run.json", (LONG_AGO, LONG_AGO))
    catalog = RunCatalog(tmp_path)
    for _ in range(3):
        assert not catalog.rows(check=False)[0].live
    assert reads == ["far"]
    os.utime(folder, (2 * LONG_AGO, 2 * LONG_AGO))
    catalog.rows(check=False)
    assert reads == ["far", "far"]
