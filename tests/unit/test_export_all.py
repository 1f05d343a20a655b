"""`stepscope export --all`: one folder, which DuckDB queries as documented."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import main
from stepscope.store import StoreWriter, store_name
from tests.support.run_folders import Row, block_of_rows, make_run, make_store

ROOT = Path(__file__).resolve().parents[2]
QUERIES = re.findall(r"^SELECT.*?;$", (ROOT / "docs/cli.md").read_text(), flags=re.M | re.S)
PARQUET = ("--all", "--format", "parquet", "--output")


def add_rows(folder: Path, rows: list[Row], rank: int = 0) -> None:
    writer = StoreWriter(folder / store_name(rank))
    with writer.transaction():
        writer.append("steps", "", block_of_rows(rows))
    writer.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs with different metrics, one of two ranks, one that is damaged and one without a store.

    The working directory is the one that the documented queries expect.
    """
    root = tmp_path / "runs"
    monkeypatch.setenv("STEPSCOPE_RUNS", str(root))
    monkeypatch.chdir(tmp_path)
    for name, loss, rate in (("a", 0.5, 0.1), ("b", 0.25, 0.01)):
        about = {"status": "finished", "kind": "init", "config": {"lr": rate}}
        folder = root / name
        os.rename(make_run(root, name, **about), folder)  # type: ignore[arg-type]
        seconds = {"perf/step_time": 2.0} if name == "b" else {}
        add_rows(folder, [(10.0 + i, i, {"train/loss": loss + i} | seconds) for i in range(3)])
    add_rows(root / "b", [(10.0, 0, {"train/loss": -9.0, "run": 7.0})], rank=1)
    for name in ("gpus", "torn", "empty"):
        os.rename(make_run(root, name, status="finished"), root / name)
    make_store(root / "gpus")
    (root / "torn" / "rank0.sqlite").write_bytes(b"x" * 5000)
    return root


def exported(tmp_path: Path, *words: str, code: int = 1) -> set[str]:
    """Export all runs; return the names of the written files."""
    output = tmp_path / "exported"
    assert main(["export", *PARQUET, str(output), *words]) == code
    return {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}


def test_duckdb_queries_the_folder_as_documented(runs: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    exported(tmp_path)
    steps, settings, devices, events = (duckdb.sql(query).fetchall() for query in QUERIES)
    assert steps == [("gpus", 3, None, 0.1), ("b", 3, 2.0, 0.25), ("a", 3, None, 0.5)]
    assert settings == [("b", "0.01", -9.0), ("gpus", None, 0.1), ("a", "0.1", 0.5)]
    assert devices == [("gpus", "GPU-a", 50.0), ("gpus", "GPU-b", 50.0)]
    assert [(run, text) for run, _, text in events] == [("gpus", '=1+1,"\nü')]
    ranks = duckdb.sql("SELECT run, rank, run_ FROM 'exported/steps/*.parquet' WHERE run_ > 0")
    assert ranks.fetchall() == [("b", 1, 7.0)], "a metric of the name of a label is kept"


def test_each_rank_with_rows_has_a_file_and_all_have_the_same_columns(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    series = {"steps/a.rank0", "steps/b.rank0", "steps/b.rank1", "steps/gpus.rank0"}
    series |= {"devices/gpus.rank0", "runs"}
    events = {f"events/{name}" for name in ("a.rank0", "b.rank0", "b.rank1", "gpus.rank0")}
    assert exported(tmp_path) == {f"{name}.parquet" for name in series | events}
    (told,) = capsys.readouterr().err.splitlines()
    assert "torn" in told
    steps = sorted((tmp_path / "exported" / "steps").iterdir())
    assert len({str(parquet.read_schema(path).names) for path in steps}) == 1
    found: dict[str, list[Any]] = parquet.read_table(steps[0]).to_pydict()
    assert found["train/loss"] == [0.5, 1.5, 2.5]
    assert (found["run"], found["rank"]) == (["a"] * 3, [0] * 3)
    assert parquet.read_table(tmp_path / "exported" / "runs.parquet").num_rows == 5


@pytest.mark.parametrize("reason", ["absent", "no pyarrow", "not empty"])
def test_an_export_that_cannot_work_writes_no_file(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str,
) -> None:
    text, code, before = str(tmp_path / reason), 2, set[str]()
    if reason == "no pyarrow":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        text, code = "pip install pyarrow", 1
    elif reason == "not empty":
        (tmp_path / "exported").mkdir()
        (tmp_path / "exported" / "mine").touch()
        text, code, before = "not empty", 1, {"mine"}
    else:
        monkeypatch.setenv("STEPSCOPE_RUNS", text)
    assert exported(tmp_path, code=code) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_wrong_usage_is_a_sentence(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "exported")
    for words in (
        ["--format", "parquet", "--output", output],
        ["--all", "--format", "csv"],
        [*PARQUET, output, "--rank", "0"],
    ):
        assert main(["export", *words]) == 2, words
        assert len(capsys.readouterr().err.splitlines()) == 1
