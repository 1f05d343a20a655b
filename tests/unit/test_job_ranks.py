"""The ranks of a job, read from real stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dashboard.api.routes import page_token
from dashboard.ranks import job_ranks
from dashboard.ranks.job_ranks import (
    MAX_RANKS_SHOWN,
    JobRanks,
    RankEntry,
    read_job,
    read_member,
    used_gpus,
)
from dashboard.run_list import Listing
from stepscope.run import read_run
from stepscope.store import StoreWriter, store_name
from tests.support.run_folders import RankFolder, block_of_rows

CREATED = 1_700_000_000.0
UTIL = "gpu/util"


class JobFolder(RankFolder):
    """A job's folder, to which ranks are added and rows written."""

    def __init__(self, root: Path, world_size: int) -> None:
        super().__init__(root, created=CREATED, kind="watch", world_size=world_size, device="cpu")

    def add(self, number: int, **facts: Any) -> None:
        self.rank(number, **facts)
        with self._store(number):
            pass

    def steps(self, number: int, start: int, stop: int, **values: float) -> None:
        keys = {"time": "perf/step_time", "wait": "perf/comm_wait"}
        named = {keys[name]: value for name, value in values.items()}
        rows = [(CREATED + 0.1 * step, step, named) for step in range(start, stop)]
        with self._store(number) as store:
            store.append("steps", "", block_of_rows(rows))

    def device(self, number: int, gpu: str, util: float) -> None:
        rows = [(CREATED + 0.1 * step, step, {UTIL: util}) for step in range(20)]
        with self._store(number) as store:
            store.append("devices", gpu, block_of_rows(rows))

    @contextmanager
    def _store(self, number: int) -> Iterator[StoreWriter]:
        path = self.folder / store_name(number)
        with closing(StoreWriter(path, reopen=path.exists())) as store, store.transaction():
            yield store


def read(job: JobFolder) -> JobRanks:
    return read_job(read_run(job.folder))


def column(found: JobRanks, title: str) -> list[Any]:
    return [row.get(title) for row in found.rows]


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path, 2)
    for rank in range(2):
        made.add(rank)
        made.steps(rank, 1, 41, time=0.1, wait=0.02 * rank)
    return made


def test_a_job_has_a_table(job: JobFolder) -> None:
    found = read(job)
    for title, values in {
        "Status": ["alive", "alive"],
        "Device": ["CPU", "CPU"],
        "Last step": [40, 40],
        "Step time": pytest.approx([100, 100]),
        "Wait for ranks": pytest.approx([0, 20]),
        "Lateness": pytest.approx([10, -10]),  # around the median of 90 ms
    }.items():
        assert column(found, title) == values
    assert not {"Data wait", "Memory", "Utilization", "Reason"} & found.rows[0].keys()


def test_ranks_without_a_file_and_a_dead_rank_have_their_state(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 4)
    for rank in (0, 1, 3):
        job.add(rank)
    job.add(3, host="elsewhere", heartbeat=time.time() - 60, pid=1)
    found = read(job)
    assert column(found, "Status") == ["alive", "alive", "never started", "dead"]
    assert column(found, "Reason")[:2] == [None, None]
    assert all(column(found, "Reason")[2:])
    assert column(found, "Ended after")[3]


def test_values_of_a_gpu_belong_to_the_rank_that_trains_on_it(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 2)
    gpus = [{"uuid": "GPU-a", "name": "x"}, {"uuid": "GPU-b", "name": "x"}]
    job.add(0, device="GPU-b", devices=gpus)
    job.add(1, device="GPU-a", local_rank=1)
    job.device(0, "GPU-a", 10.0)
    job.device(0, "GPU-b", 90.0)
    found = read(job)
    assert column(found, "Device") == ["GPU 1", "GPU 0"]
    assert column(found, "Utilization") == [90.0, 10.0]


def test_further_ranks_are_counted(tmp_path: Path) -> None:
    ranks = MAX_RANKS_SHOWN + 6
    job = JobFolder(tmp_path, ranks)
    for rank in range(ranks):
        job.add(rank)
    found = read(job)
    assert (len(found.rows), found.left_out) == (MAX_RANKS_SHOWN, 6)


def test_files_that_others_have_written_break_nothing(job: JobFolder) -> None:
    for number, text in enumerate(("[]", "{}", "nonsense", '{"heartbeat": "x", "status": 1}'), 2):
        (job.folder / f"rank{number}.json").write_text(text)
    (job.folder / "rank6.json").write_text("[" * 100_000)
    (job.folder / "rank2.sqlite").write_bytes(b"x" * 5000)
    (job.folder / "rank-1.json").write_text("{}")
    job.add(1, rank=10**30, local_rank=-1, device={"a": 1}, reason=["no"], host="\x1b[31m" * 99)
    job.steps(0, 41, 42, time=float("inf"), wait=float("nan"))
    found = read(job)
    assert column(found, "Status") == ["alive"] * 2 + ["not recorded"] * 5
    assert "\x1b" not in column(found, "Host")[1]


def test_impossible_ranks_are_not_shown(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 3)
    for number, rank in enumerate((0, 2**62, -3)):
        job.add(number, rank=rank, local_rank=-7 if number else 0)
    found = [read_member(job.folder, number) for number in range(3)]
    assert [member.rank for member in found] == [0, 1, 2]
    assert [member.local_rank for member in found] == [0, None, None]


# --- the GPUs of a script -------------------------------------------------------------------------

GPUS = [{"uuid": f"GPU-{index}"} for index in range(4)]


@pytest.mark.parametrize(
    ("rank0", "used"),
    [
        ({"device": "GPU-1", "world_size": 1}, {"GPU-1"}),
        ({"device": "GPU-1"}, {"GPU-1", "GPU-3"}),  # and the device of rank 1
        ({"device": "GPU-1", "world_size": 1, "kind": "trainer"}, set()),
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
    monkeypatch.setattr(job_ranks.DEVICES, "_start", lambda search: search())
    job = JobFolder(tmp_path, 2)
    job.add(0, devices=GPUS, **rank0)
    job.add(1, device="GPU-3")
    assert used_gpus(read_run(job.folder)) == used


def test_a_poll_reads_no_file_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Callable[[], None]] = []
    monkeypatch.setattr(job_ranks.DEVICES, "_start", searches.append)
    job = JobFolder(tmp_path, 2)
    job.add(0, devices=GPUS, device="GPU-1")
    job.add(1, device="GPU-3")
    run = read_run(job.folder)
    before = page_token(Listing((), ""), run)
    read: list[int] = []

    def counted(folder: Path, number: int) -> RankEntry:
        read.append(number)
        return read_member(folder, number)

    monkeypatch.setattr(job_ranks, "read_member", counted)
    assert page_token(Listing((), ""), run) == before
    assert not read
    searches.pop()()
    assert read == [0, 1]
    assert page_token(Listing((), ""), run) != before  # the page's script draws the tiles again
    assert not searches
