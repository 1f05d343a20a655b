"""Stores of earlier versions, as files: read exactly, sent commands, and completed or left.

`tests/data/stores/version-N/rank0.sqlite` was written by the code of that version: 600 steps in
batches of 37, among them a missing loss (step 18), a NaN (41, missing in those versions) and an
infinite one (51), and from step 301 on a second metric; 20 rows of samples and of one GPU, two
events, a command that was served and one that was not.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepscope
from stepscope.cli import main
from stepscope.recorder.recovery import recover
from stepscope.recorder.ring import RingBuffer
from stepscope.run import process_identity, write_run_json
from stepscope.store import STORE_NAME, StoreError, StoreReader, schema
from stepscope.store.reader import send_command
from tests.support.run_values import block_of

STORES = Path(__file__).parents[1] / "data" / "stores"
LOSSES = [{17: math.nan, 40: math.nan, 50: math.inf}.get(i, i / 2) for i in range(600)]
LATE = [math.nan] * 300 + [-float(i) for i in range(300, 600)]


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def folder(tmp_path: Path, version: int) -> Path:
    """A copy of the store of a version, in a run folder of its own."""
    return Path(shutil.copytree(STORES / f"version-{version}", tmp_path / "run"))


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / STORE_NAME)) as connection:
        return connection.execute(sql).fetchall()


def user_version(folder: Path) -> int:
    return int(query(folder, "PRAGMA user_version")[0][0])


def put_ring(folder: Path, tmp_path: Path) -> None:
    """Put a ring with steps 1 to 650 into the folder, as a killed process leaves it."""
    exited = process_identity() | {"pid": 2**22 + 1}
    write_run_json(folder, {"created": 1.0, "status": "running", "heartbeat": 2.0, **exited})
    ring = RingBuffer(tmp_path / "rank0.ring")
    layout = ring.layout(("train/loss",), False)
    assert layout is not None
    for step in range(1, 651):
        ring.put(layout, 1000.0 + step, step, [math.nan if step == 640 else 1.0])
    shutil.copy(ring.path, folder)
    ring.close()


def test_every_row_is_read_as_it_was_written(folder: Path, version: int) -> None:
    assert user_version(folder) == version
    with StoreReader(folder) as reader:
        rows = {(info.stream, info.source): info.rows for info in reader.series()}
        window = reader.rows_between(1, "step", 101, 200)
        assert reader.keys(1) == ("train/loss", "custom/late")
    assert rows == {("steps", ""): 600, ("samples", ""): 20, ("devices", "GPU-1"): 20}
    assert window == (100, 200)
    steps, devices = block_of(folder), block_of(folder, "devices", "GPU-1")
    assert steps.step.tolist() == list(range(1, 601))
    assert steps.ts.tolist() == [1000.0 + i / 10 for i in range(600)]
    assert steps.keys == ("train/loss", "custom/late")
    np.testing.assert_array_equal(steps.mean, [LOSSES, LATE])
    assert (steps.count.sum(axis=1).tolist(), steps.odd.sum()) == ([597, 300], 1)
    assert (devices.keys, devices.mean.tolist()) == (("gpu/util",), [[float(i) for i in range(20)]])


def test_buckets_count_what_those_versions_counted(folder: Path) -> None:
    """Earlier versions counted infinite values, and had no `odd`."""
    with StoreReader(folder) as reader:
        block = reader.read(1, 0, 600, 16)
    assert block.count.sum(axis=1).tolist() == [598, 300]
    assert block.odd.sum() == 0
    assert block.low[0].tolist()[:4] == [0.0, 8.0, 16.0, 24.0]
    assert np.flatnonzero(np.isinf(block.high[0])).tolist() == [50 // 16]
    assert block.mean[0, 0] == np.mean(LOSSES[:16])


def test_events_and_commands_are_kept_and_commands_can_be_sent(folder: Path) -> None:
    with StoreReader(folder) as reader:
        events = reader.events()
    assert [(event.step, event.kind, event.text, event.data) for event in events] == [
        (15, "mark", "a note", {"before": {"memory": 1.5}}),
        (25, "nan", "train/loss is nan", {}),
    ]
    before = [("pause", "done", "Pause: after step 30"), ("mark", "asked", None)]
    send_command(folder, "stop", {})
    commands = query(folder, "SELECT name, state, result FROM commands ORDER BY id")
    assert commands == [*before, ("stop", "asked", None)]


@pytest.mark.parametrize("version", [1])
def test_a_store_from_before_the_ring_is_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    put_ring(folder, tmp_path)
    before = (folder / STORE_NAME).read_bytes()
    with pytest.raises(StoreError, match="version 1 had no ring"):
        recover(folder)
    assert (folder / "rank0.ring").exists()
    with StoreReader(folder) as reader:
        assert reader.series()[0].rows == 600
    assert user_version(folder) == 1
    assert (folder / STORE_NAME).read_bytes() == before


@pytest.mark.parametrize("version", [2])
def test_the_last_rows_of_a_killed_process_are_added(folder: Path, tmp_path: Path) -> None:
    put_ring(folder, tmp_path)
    assert recover(folder) == 50
    with StoreReader(folder) as reader:
        rows = reader.read(1, 0, 650, 1)
        buckets = reader.read(1, 0, 650, 16)
    assert rows.step.tolist() == list(range(1, 651))
    np.testing.assert_array_equal(rows.mean[0, :600], LOSSES)
    assert rows.mean[1, 600:].tolist() == pytest.approx([math.nan] * 50, nan_ok=True)
    assert buckets.odd.sum() == 1  # the new NaN alone: this form has a place for it
    assert user_version(folder) == schema.SCHEMA_VERSION


def test_an_old_store_is_opened_from_python_and_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(folder.parent))
    write_run_json(folder, {"created": 1.0, "status": "finished", "heartbeat": 2.0})
    before = (folder / STORE_NAME).read_bytes()
    run = stepscope.open(folder)
    assert set(run.metrics) >= {"train/loss", "custom/late", "gpu/util"}
    np.testing.assert_array_equal(run.series("train/loss").value, LOSSES)
    assert main(["export", "run", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["custom/late"] for row in rows[299:302]] == [None, -300.0, -301.0]
    assert main(["diagnose", "run"]) == 0
    assert (folder / STORE_NAME).read_bytes() == before, "reading changes no store"


@pytest.mark.parametrize("version", [2])
def test_a_newer_store_is_refused_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(folder.parent))
    write_run_json(folder, {"created": 1.0, "status": "finished", "heartbeat": 2.0})
    newer = schema.SCHEMA_VERSION + 1
    query(folder, f"PRAGMA user_version = {newer}")
    sentence = f"store version {newer} is newer than this program's .*Update Stepscope to open it"
    with pytest.raises(StoreError, match=sentence):
        stepscope.open(folder).series("train/loss")
    with pytest.raises(StoreError, match=sentence):
        send_command(folder, "stop", {})
    for words in (["export", "run", "--format", "csv"], ["diagnose", "run"]):
        assert main(words) == 1
        assert re.search(sentence, capsys.readouterr().err), words
    assert main(["runs"]) == 0
    assert "finished" in capsys.readouterr().out, "run.json is read"
    assert user_version(folder) == newer
