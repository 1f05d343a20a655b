"""Who of a job is alive, dead, missing or recorded elsewhere, from the files of its folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.diagnosis.findings import findings, read_recorded
from stepscope.run import read_run
from stepscope.run.rank_info import RANKS_LIMIT
from stepscope.run.rank_status import GRACE_S, ranks_of
from stepscope.store import StoreWriter
from tests.support.run_folders import GONE_PID, RankFolder


class Job(RankFolder):
    def rank(
        self, number: int, status: str = "running", *, age_s: float = 60.0, **more: Any
    ) -> None:
        super().rank(number, status, **{"created": time.time() - age_s, **more})

    def dies(self, number: int, **more: Any) -> None:
        self.rank(number, pid=GONE_PID, heartbeat=time.time() - 20.0, **more)

    def found(self) -> tuple[str, int | None]:
        """The kind and the rank of the only finding."""
        StoreWriter(self.folder / "rank0.sqlite").close()
        [finding] = findings(read_recorded(read_run(self.folder)))
        return finding.kind, finding.rank

    def states(self) -> list[str]:
        return [rank.status.value for rank in ranks_of(self.folder)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, world_size=4, kind="watch")


def test_ranks_may_still_come_for_a_while_and_then_are_named(job: Job) -> None:
    job.rank(0, age_s=GRACE_S - 5)
    job.rank(1)
    assert job.states() == ["alive", "alive", "not recorded", "not recorded"]
    for number in (0, 1, 3):
        job.rank(number)
    assert job.states() == ["alive", "alive", "never started", "alive"]
    assert job.found() == ("rank-missing", 2)


def test_a_rank_that_dies_while_others_live_is_named_with_its_host(job: Job) -> None:
    for number in (0, 1, 2):
        job.rank(number)
    job.dies(3, host="node7")
    before = time.time()
    assert job.states() == ["alive", "alive", "alive", "dead"]
    dead = ranks_of(job.folder)[3].info
    assert dead is not None
    assert dead.beat == pytest.approx(before - 20.0, abs=1.0)
    assert job.found() == ("rank-dead", 3)


def test_ranks_that_have_ended_are_no_loss(job: Job) -> None:
    job.rank(0)
    old = time.time() - 100.0
    for number, status in ((1, "finished"), (2, "stopped"), (3, "failed")):
        job.rank(number, status, heartbeat=old, ended=old, reason="why", pid=GONE_PID)
    assert job.states() == ["alive", "finished", "stopped", "failed"]
    assert [rank.text for rank in ranks_of(job.folder)][1:] == ["why"] * 3


def test_a_host_with_a_folder_of_its_own_speaks_of_the_others(job: Job) -> None:
    """torch's ranks 2 and 3 of four, on the second of two hosts."""
    job.rank(0, rank=2, folder_of="host")
    job.rank(1, rank=3, folder_of="host")
    assert job.states() == ["not recorded", "not recorded", "alive", "alive"]


def test_ranks_that_a_launcher_counts_in_another_way_miss_none(job: Job) -> None:
    for number in range(4):
        job.rank(number, rank=number + 1)
    assert job.states() == ["alive"] * 4


def test_init_may_be_called_by_one_rank_only(job: Job) -> None:
    job.rank(0, kind="init")
    assert job.states() == ["alive"] + ["not recorded"] * 3


@pytest.mark.parametrize("size", [-1, 0, RANKS_LIMIT + 1, "4", None])
def test_an_impossible_world_size_is_not_believed(job: Job, size: Any) -> None:
    job.rank(0, world_size=size)
    assert job.states() == ["alive"]
