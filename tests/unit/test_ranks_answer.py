"""The answer to a tab that shows a job, from real stores: names, table, heatmap."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard.api.page_token import page_token
from dashboard.ranks import members
from dashboard.ranks.job_ranks import missing_text, ranks_answer, read_job
from dashboard.ranks.members import MAX_RANKS_SHOWN, read_member, used_gpus
from dashboard.run_index import RunList
from stepscope.run import RunStatus, process_identity, rank_json, read_run, write_run_json
from stepscope.store import SeriesBlock, StoreWriter, store_name

CREATED = 1_700_000_000.0
TIME, WAIT, UTIL = "perf/step_time", "perf/comm_wait", "gpu/util"


class JobFolder:
    """A job's folder, to which ranks are added and rows written."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        self.world_size = world_size

    def add(self, number: int, **facts: Any) -> None:
        base = {
            "created": CREATED,
            "status": "running",
            "heartbeat": time.time(),
            "kind": "watch",
            "rank": number,
            "world_size": self.world_size,
            "device": "cpu",
        }
        told = base | process_identity() | facts
        write_run_json(self.folder, told, rank_json(number), durable=False)
        with self._store(number):
            pass

    def steps(self, number: int, start: int, stop: int, **values: float) -> None:
        keys = {"time": TIME, "wait": WAIT, "loss": "train/loss", "allocated": "memory/allocated"}
        named = {keys[name]: value for name, value in values.items()}
        rows = [(CREATED + 0.1 * step, step, named) for step in range(start, stop)]
        with self._store(number) as store:
            stream = "samples" if "allocated" in values else "steps"
            store.append(stream, "", SeriesBlock.from_rows(rows))

    def device(self, number: int, gpu: str, util: float) -> None:
        rows = [(CREATED + 0.1 * step, step, {UTIL: util}) for step in range(20)]
        with self._store(number) as store:
            store.append("devices", gpu, SeriesBlock.from_rows(rows))

    @contextmanager
    def _store(self, number: int) -> Iterator[StoreWriter]:
        path = self.folder / store_name(number)
        with closing(StoreWriter(path, reopen=path.exists())) as store, store.transaction():
            yield store


def ask(job: JobFolder, metric: str = "", axis: str = "time") -> dict[str, Any]:
    """Return the answer to a tab, and its heatmap (columns, ranks)."""
    run = read_run(job.folder)
    answer = ranks_answer(read_job(run), run, metric, axis)
    assert len(json.dumps(answer, allow_nan=False)) < 60_000
    cells = np.frombuffer(base64.b64decode(answer["cells"]), "<f4")
    return answer | {"cells": cells.reshape(-1, len(answer["ranks"]))}


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path, 2)
    for rank in range(2):
        made.add(rank)
        made.steps(rank, 1, 41, time=0.1, wait=0.02 * rank, loss=1.0 + rank)
    return made


def test_an_answer_has_names_table_and_heatmap(job: JobFolder) -> None:
    found = ask(job)
    host = process_identity()["host"]
    assert found["ranks"] == [[0, host, "CPU"], [1, host, "CPU"]]
    assert (found["missing"], found["missing_text"]) == ({}, "")
    table = found["table"]
    assert table["step"] == [40, 40]
    assert (table["time"], table["wait"]) == (pytest.approx([0.1, 0.1]), pytest.approx([0, 20]))
    assert table["data"] == table["memory"] == [None, None]
    assert found["state"] == ["alive", "alive"]
    assert (found["metrics"], found["metric"]) == ([TIME, WAIT, "train/loss"], TIME)
    assert found["cells"] == pytest.approx(np.full((17, 2), 0.1))  # 4.1 s of 0.25 s
    assert ask(job, "train/loss")["cells"][0].tolist() == [1.0, 2.0]
    assert ask(job, "no/such")["metric"] == TIME


def test_before_the_ranks_are_read_there_are_none(job: JobFolder) -> None:
    run = read_run(job.folder)
    found = ranks_answer(None, run, "", "time")
    assert found.keys() == {"run", "live", "now", "axis"}


def test_the_heatmap_can_be_over_steps_each_rank_by_its_own(job: JobFolder) -> None:
    job.steps(1, 41, 200, time=0.3)  # a rank that counts on
    found = ask(job, axis="step")
    assert (found["width"], len(found["cells"])) == (2, 100)  # 200 steps in 120 columns
    first, second = found["cells"].T
    assert np.flatnonzero(np.isfinite(first)).tolist() == list(range(21))
    assert second[[0, 20, 21, 99]] == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_ranks_without_a_file_are_named_by_state(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 8)
    for rank in (0, 1, 2, 3, 4, 6, 7):
        job.add(rank)
    found = ask(job)
    assert (found["world_size"], found["missing"]) == (8, {"never started": [5]})
    job.add(5)
    assert ask(job)["missing"] == {}


def test_a_dead_rank_has_the_time_of_its_last_heartbeat(job: JobFolder) -> None:
    beat = time.time() - 60
    job.add(1, host="elsewhere", heartbeat=beat, pid=1)
    os.utime(job.folder / "rank1.json", (beat, beat))
    found = ask(job)
    assert found["state"] == ["alive", "dead"]
    ((row, seconds, reason),) = found["ends"]
    assert (row, reason) == (1, None)
    assert seconds == pytest.approx(beat - CREATED, abs=0.1)


def test_the_time_axis_of_a_crashed_job_ends_at_its_last_heartbeat(job: JobFolder) -> None:
    job.add(0, host="elsewhere", heartbeat=CREATED + 60, wall_offset_s=10.0)
    os.utime(job.folder / "run.json", (CREATED, CREATED))
    found = ask(job)
    assert not found["live"]
    assert found["now"] == pytest.approx(50, abs=0.1)  # by the clock of the rank


def test_the_gpus_that_one_rank_samples_are_shown_with_those_that_train_on_them(
    tmp_path: Path,
) -> None:
    job = JobFolder(tmp_path, 2)
    gpus = [{"uuid": "GPU-a", "name": "x"}, {"uuid": "GPU-b", "name": "x"}]
    job.add(0, device="GPU-b", devices=gpus)
    job.add(1, device="GPU-a", local_rank=1)
    job.device(0, "GPU-a", 10.0)
    job.device(0, "GPU-b", 90.0)
    found = ask(job, UTIL)
    assert [place for *_, place in found["ranks"]] == ["GPU 1", "GPU 0"]
    assert found["table"]["step"] == [None, None], "no step has a row"
    assert found["cells"][:2].tolist() == [[90.0, 10.0], [90.0, 10.0]]


def test_impossible_ranks_are_not_shown(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 3)
    for number, rank in enumerate((0, 2**62, -3)):
        job.add(number, **{"rank": rank, "local_rank": -7 if number else 0})
    members = [read_member(job.folder, number) for number in range(3)]
    assert [member.rank for member in members] == [0, 1, 2]
    assert [member.local_rank for member in members] == [0, None, None]


def test_many_ranks_and_a_long_run(tmp_path: Path) -> None:
    ranks = 70
    job = JobFolder(tmp_path, ranks)
    for rank in range(ranks):
        job.add(rank, host=f"a-long-name-of-a-host-{rank // 8}", local_rank=rank % 8)
        job.steps(rank, 1, 400, time=0.123456, loss=1.0)
    job.steps(0, 400, 20_000, time=0.123456)
    found = ask(job)
    assert len(found["ranks"]) == MAX_RANKS_SHOWN
    assert found["missing_text"].startswith(f"{ranks - MAX_RANKS_SHOWN} more rank")
    assert (found["width"], len(found["cells"])) == (32, 63)  # 2,000 s
    assert found["cells"][:, 0] == pytest.approx(np.full(63, 0.123456))
    assert found["table"]["step"][:2] == [19_999, 399]


def test_files_that_others_have_written_break_nothing(job: JobFolder) -> None:
    for number, text in enumerate(("[]", "{}", "nonsense", '{"heartbeat": "x", "status": 1}'), 2):
        (job.folder / f"rank{number}.json").write_text(text)
    (job.folder / "rank6.json").write_text("[" * 100_000)
    (job.folder / "rank2.sqlite").write_bytes(b"x" * 5000)
    (job.folder / "rank-1.json").write_text("{}")
    job.add(1, rank=10**30, local_rank=-1, device={"a": 1}, reason=["no"], host="\x1b[31m" * 99)
    job.steps(0, 41, 42, time=float("inf"), wait=float("nan"))
    found = ask(job)
    assert [rank for rank, *_ in found["ranks"]] == [0, 1, 2, 3, 4, 5, 6]
    assert found["state"] == ["alive"] * 2 + ["starting"] * 5
    assert "\x1b" not in found["ranks"][1][1]


@pytest.mark.parametrize("ended", [10**400, float("nan"), -1e300, True, "1"], ids=range(5))
def test_an_invalid_end_of_a_rank_is_its_last_heartbeat(job: JobFolder, ended: Any) -> None:
    job.add(1, ended=ended, status="finished")
    member = read_member(job.folder, 1)
    assert member.status is RunStatus.FINISHED
    assert member.ended == pytest.approx(time.time(), abs=60)
    job.add(0, ended=ended, status="finished")
    assert abs(ask(job)["now"] + CREATED - time.time()) < 60


GPUS = [{"uuid": f"GPU-{index}"} for index in range(4)]


@pytest.mark.parametrize(
    ("rank0", "used"),
    [
        ({"device": "GPU-1", "world_size": 1}, {"GPU-1"}),
        ({"device": "GPU-1"}, {"GPU-1", "GPU-3"}),  # and the device of rank 1
        ({"device": "GPU-1", "world_size": 1, "kind": "trainer"}, set()),
        ({"device": None, "world_size": 1}, set()),
        ({"device": "cpu", "world_size": 1}, set()),
        (
            {"device": "GPU-1", "world_size": 1, "gpu_processes": {"GPU-2": [{"pid": 5}, 3]}},
            {"GPU-1"},
        ),
        (
            {"device": "GPU-1", "world_size": 1, "pid": None, "gpu_processes": {"GPU-2": [{}]}},
            {"GPU-1"},
        ),
        (
            {
                **{"device": "GPU-1", "world_size": 1, "pid": 5},
                "gpu_processes": {"GPU-1": 7, "GPU-2": [{"pid": 5}], "GPU-x": [{"pid": 5}]},
            },
            {"GPU-1", "GPU-2"},
        ),
    ],
)
def test_the_gpus_of_a_script_are_those_of_its_ranks_and_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank0: dict[str, Any], used: set[str]
) -> None:
    monkeypatch.setattr(members.DEVICES, "_start", lambda search: search())
    job = JobFolder(tmp_path, 2)
    job.add(0, devices=GPUS, **rank0)
    job.add(1, device="GPU-3")
    assert used_gpus(read_run(tmp_path)) == used


def test_a_poll_reads_no_file_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Callable[[], None]] = []
    monkeypatch.setattr(members.DEVICES, "_start", searches.append)
    job = JobFolder(tmp_path, 2)
    job.add(0, devices=GPUS, device="GPU-1")
    job.add(1, device="GPU-3")
    run = read_run(tmp_path)
    before = page_token(RunList((), ""), run)
    read: list[int] = []
    original = members.read_member
    monkeypatch.setattr(members, "read_member", lambda *of: read.append(of[1]) or original(*of))
    assert page_token(RunList((), ""), run) == before
    assert not read
    searches.pop()()
    assert read == [0, 1]
    assert page_token(RunList((), ""), run) != before  # the page's script draws the tiles again
    assert not searches


@pytest.mark.parametrize("size", ["8", None, -1, 10**12, True, 8.0, [8]])
def test_an_invalid_world_size_counts_as_one_process(tmp_path: Path, size: Any) -> None:
    job = JobFolder(tmp_path, 1)
    job.add(0, world_size=size)
    found = ask(job)
    assert (found["world_size"], found["missing"]) == (1, {})


def test_missing_ranks_are_named() -> None:
    assert missing_text({"never started": [5], "elsewhere": [8, 9, 10]}, 2) == (
        "Rank 5 never started, or is not watched. Ranks 8, 9, 10 are recorded in another folder, "
        "if at all: hosts that share no disk have one each. 2 more ranks are recorded, not shown."
    )
