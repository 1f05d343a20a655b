"""The recorded examples: complete, small, anonymous, readable without write permission."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunKind, RunStatus, read_only_reason, read_run
from stepscope.store import STORE_NAME, StoreReader

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = {path.parent.name: path.parent for path in EXAMPLES.glob("*/run.json")}


def kinds(folder: Path) -> set[str]:
    with StoreReader(folder) as reader:
        return {event.kind for event in reader.events()}


def test_there_are_three_small_ones_without_a_journal() -> None:
    """Bytes 18 and 19 of a SQLite file are 2 in WAL mode, which needs files in its folder."""
    assert set(RUNS) == {"cpu-training", "two-simulated-gpus", "h100"}
    size = sum(path.stat().st_size for path in EXAMPLES.rglob("*") if path.is_file())
    assert size < 1_000_000
    for folder in RUNS.values():
        assert (folder / STORE_NAME).read_bytes()[18:20] == b"\x01\x01"


@pytest.mark.parametrize("name", RUNS)
def test_each_says_what_it_is_and_belongs_to_no_machine(name: str) -> None:
    run = read_run(RUNS[name])
    assert run.run_json["name"].startswith("Example: ")
    assert run.run_json["note"].startswith("Recorded on a ")
    assert ("simulat" in run.run_json["note"]) == ("simulat" in name)
    assert read_only_reason(run) is not None
    assert recover_ended(run) == 0
    with closing(sqlite3.connect(run.folder / STORE_NAME)) as store:
        events = str(store.execute("SELECT text, data FROM events").fetchall())
    files = [path.read_text() for path in run.folder.iterdir() if path.name != STORE_NAME]
    for text in (events, *files):
        assert not re.search(r"/(home|root|work|tmp|Users)/", text)
    assert {run.run_json["host"], run.run_json["user"]} == {"example"}
    assert run.run_json["environment"]["host"] == "example"


@pytest.mark.parametrize(
    ("name", "more"),
    [("cpu-training", {"save_checkpoint", "checkpoint", "resumed"}), ("h100", set())],
)
def test_the_finished_examples_have_every_kind_of_event(name: str, more: set[str]) -> None:
    assert read_run(RUNS[name]).status is RunStatus.FINISHED
    buttons = {"pause", "resume", "mark", "empty_cache", "reset_peaks", "collect_garbage"}
    assert kinds(RUNS[name]) >= buttons | more | {"epoch"}


def test_the_simulated_example_has_two_devices_and_runs_out_of_memory() -> None:
    run = read_run(RUNS["two-simulated-gpus"])
    assert (run.status, run.run_json["kind"]) == (RunStatus.FAILED, RunKind.WATCH)
    assert [gpu["name"] for gpu in run.run_json["devices"]] == ["Simulated GPU"] * 2
    assert "oom" in kinds(run.folder)
    with StoreReader(run.folder) as reader:
        devices = [info for info in reader.series() if info.stream == "devices"]
        assert len(devices) == 2
        for info in devices:
            assert "gpu/mem_used" in reader.keys(info.id)


def test_the_example_of_a_gpu_has_its_metrics() -> None:
    with StoreReader(RUNS["h100"]) as reader:
        (gpu,) = (info for info in reader.series() if info.stream == "devices")
        assert {"gpu/util", "gpu/power", "gpu/energy", "gpu/sm_active"} <= set(reader.keys(gpu.id))


@pytest.mark.skipif(getpass.getuser() == "root", reason="root may write everywhere")
def test_each_opens_from_a_folder_without_write_permission(tmp_path: Path) -> None:
    for name, source in RUNS.items():
        folder = shutil.copytree(source, tmp_path / name)
        os.chmod(folder, 0o555)
        try:
            assert kinds(folder)
        finally:
            os.chmod(folder, 0o755)
