"""Rows of the Runs page and the search in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dashboard.run_list import RunList
from dashboard.run_rows import RunRow, search
from stepscope.run import process_identity, write_run_json


def write(root: Path, name: str, **run_json: Any) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    known = {"name": name, "status": "finished", "created": 1.0, "heartbeat": 1.0, "ended": 61.0}
    final = {"train/loss": {"last": 0.5, "best": 0.25}}
    values = {"final": final, "totals": {"steps": 10}}
    write_run_json(folder, known | process_identity() | values | run_json)


def rows(root: Path) -> list[RunRow]:
    return RunList(root).rows()


def test_settings_and_metrics_are_cells(tmp_path: Path) -> None:
    texts = {"day": "20231126", "agent": "007", "x": "1e5", "y": "nan"}
    write(tmp_path, "a", config={**texts, "lr": 0.1, "precision": {"a": 1}})
    (row,) = rows(tmp_path)
    assert {name: row.cells[f"config: {name}"] for name in texts} == texts, "texts remain texts"
    metrics = {"config: lr": 0.1, "final: train/loss": 0.5, "best: train/loss": 0.25}
    assert row.cells.items() >= metrics.items()
    assert (row.duration, row.cells["Best loss"], row.cells["Precision"]) == (60.0, 0.25, None)
    assert search([row], "precision=16 precision>1")[0] == []


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", {"a", "b", "c"}),
        ("SWEEP lr=0.1", {"a"}),
        ("lr>=0.1 train/loss<0.4", {"b"}),
        ("best:_train/loss<=0.25", {"a", "b", "c"}),
        ("status=fail", {"c"}),
        ("careful", {"b"}),
        ("lr", {"a", "b"}),
        ("day=20231126", {"c"}),
        ("day=nan", set()),
        ("x=nan", {"c"}),
        ("lr>x", set()),
        ("#baseline", {"a"}),
        ("duration>=60 duration<61", {"a", "b", "c"}),
        ("started<1970-01-02", {"a", "b", "c"}),
        ("model.depth=12", {"b"}),
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
    assert {row.id for row in search(rows(tmp_path), query)[0]} == ids


def test_a_condition_that_no_run_can_satisfy_is_explained(tmp_path: Path) -> None:
    write(tmp_path, "a", config={"lr": 0.1})
    found = rows(tmp_path)
    assert search(found, "a lr>0.5 config:lr=0.1 duration>1") == ([], None)
    for query in ("depth>3", "lr!=0.1", "lr>", "=3"):
        assert query[:2] in str(search(found, query)[1])
