"""An export has every row of a run, in a valid form, and replaces its file atomically."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from stepscope.cli import main
from stepscope.export.tables import Column, Table, opened, write_csv
from stepscope.store import STORE_NAME, StoreWriter
from tests.support.run_folders import Row, block_of_rows, make_run, make_store


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run in STEPSCOPE_RUNS."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "runs"))
    folder = make_run(tmp_path / "runs", status="finished")
    make_store(folder)
    return folder


def exported(run: Path, output: Path, *arguments: str) -> int:
    return main(["export", run.name, "--output", str(output), *arguments])


def table(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    """Return the rows of an export as CSV."""
    assert main(["export", str(run), "--format", "csv", *arguments]) == 0  # the path, not the name
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))


def replace_store(run: Path, *batches: list[Row]) -> None:
    (run / STORE_NAME).unlink()
    writer = StoreWriter(run / STORE_NAME)
    for rows in batches:
        with writer.transaction():
            writer.append("steps", "", block_of_rows(rows))
    writer.close()


def test_non_finite_values_are_kept_and_missing_ones_are_empty(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses: list[float | None] = [1.0, math.nan, math.inf, -math.inf, None]
    rows: list[Row] = [(20.0 + i, i, {"train/loss": loss}) for i, loss in enumerate(losses)]
    rows[-1][2]["=cmd()"] = 0.5
    replace_store(run, rows)
    assert main(["export", run.name, "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ts,step,train/loss,'=cmd()",
        *("20.0,0,1.0,", "21.0,1,nan,", "22.0,2,inf,", "23.0,3,-inf,", "24.0,4,,0.5"),
    ]


def test_parquet_keeps_numbers_texts_and_nulls(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert exported(run, tmp_path / "steps.parquet", "--format", "parquet") == 0
    found = parquet.read_table(tmp_path / "steps.parquet").to_pydict()
    assert (found["step"], found["train/loss"]) == ([1, 2, 3], [0.1, None, 0.3])
    assert found["=cmd()"] == [None, None, math.inf]


def test_devices_have_a_uuid_and_events_are_quoted_and_never_a_formula(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(run, capsys, "--stream", "devices")
    assert [(row["uuid"], row["gpu/util"]) for row in rows] == [
        ("GPU-a", "50.0"),
        ("GPU-b", "50.0"),
    ]
    (event,) = table(run, capsys, "--stream", "events")
    assert (event["step"], event["epoch"], event["text"]) == ("0", "1", "'=1+1,\"\nü")
    assert json.loads(event["data"]) == {"after": "Infinity", "list": [1]}


def test_another_rank_is_another_store(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(run, rank=1)
    (run / STORE_NAME).unlink()
    assert main(["export", run.name, "--format", "csv", "--rank", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("r --format parquet", "--output: "),
        ("r --format tensorboard --stream events --output x", "--stream: "),
        ("nope --format csv", "run: "),
        ("../nope --format csv", "run: "),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    run: Path, arguments: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [run.name if word == "r" else word for word in arguments.split()]
    assert main(["export", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(problem)


def test_a_missing_package_is_named_with_the_remedy(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "stepscope.export.tensorboard", raising=False)
    assert exported(run, tmp_path / "out", "--format", "tensorboard") == 1
    assert "pip install tensorboard" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_failed_export_leaves_the_former_file(tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    output.write_text("former")

    def batches() -> Iterator[Sequence[Column]]:
        yield [np.array([1.0])]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"), opened(output) as out:
        write_csv(out, Table({"ts": "float"}, batches()))
    assert output.read_text() == "former"
    assert list(tmp_path.iterdir()) == [output]


def test_an_output_that_is_no_plain_file_is_written_or_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(run, Path("/dev/null"), "--format", "csv") == 0
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link.csv").symlink_to(tmp_path / "target.csv")
    assert exported(run, tmp_path / "link.csv", "--format", "csv") == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert exported(run, tmp_path / "no" / "out.csv", "--format", "csv") == 1
    assert "--output: cannot be written" in capsys.readouterr().err
    assert exported(run, tmp_path, "--format", "csv") == 1
    assert "it is a folder" in capsys.readouterr().err
