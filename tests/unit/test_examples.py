"""The recorded examples: complete, small, anonymous, readable without write permission."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stepscope.remote.access import read_only_reason
from stepscope.run import RunStatus, read_run
from stepscope.store import STORE_NAME, StoreReader

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = {path.parent.name: path.parent for path in EXAMPLES.glob("*/run.json")}


def test_there_are_three_small_ones_without_a_journal() -> None:
    """Bytes 18 and 19 of a SQLite file are 2 in WAL mode, which needs files in its folder."""
    assert set(RUNS) == {"cpu-training", "two-simulated-gpus", "h100"}
    size = sum(path.stat().st_size for path in EXAMPLES.rglob("*") if path.is_file())
    assert size < 1_000_000
    for folder in RUNS.values():
        assert (folder / STORE_NAME).read_bytes()[18:20] == b"\x01\x01"


@pytest.mark.parametrize("name", RUNS)
def test_each_has_its_description_and_names_no_machine(name: str) -> None:
    run = read_run(RUNS[name])
    assert read_only_reason(run) is not None
    with closing(sqlite3.connect(run.folder / STORE_NAME)) as store:
        events = str(store.execute("SELECT text, data FROM events").fetchall())
    files = [path.read_text() for path in run.folder.iterdir() if path.name != STORE_NAME]
    for text in (events, *files):
        assert not re.search(r"/(home|root|work|tmp|Users)/", text)
    host, environment = run.run_json["host"], run.run_json["environment"]
    assert {host, run.run_json["user"], environment["host"]} == {"example"}


@pytest.mark.parametrize(
    ("name", "status", "event", "gpus", "metric"),
    [
        ("cpu-training", RunStatus.FINISHED, "resumed", 0, None),
        ("two-simulated-gpus", RunStatus.FAILED, "oom", 2, "gpu/mem_used"),
        ("h100", RunStatus.FINISHED, "empty_cache", 1, "gpu/sm_active"),
    ],
)
def test_each_has_its_events_and_gpus(
    name: str, status: RunStatus, event: str, gpus: int, metric: str | None
) -> None:
    run = read_run(RUNS[name])
    assert run.status is status
    with StoreReader(run.folder) as reader:
        assert event in {one.kind for one in reader.events()}
        devices = [info for info in reader.series() if info.stream == "devices"]
        assert len(devices) == gpus
        assert all(metric in reader.keys(info.id) for info in devices)
