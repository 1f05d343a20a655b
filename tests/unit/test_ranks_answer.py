"""The answer to a tab that shows a job, from real stores: who there is, what is new, its bytes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard.api.ranks import Jobs, ranks_answer
from dashboard.ranks.members import MAX_RANKS_SHOWN, read_member
from dashboard.ranks.rank_cache import RankCache, overview_bucket
from dashboard.ranks.ranks_response import (
    MAX_BYTES,
    MAX_NAMED_RANKS,
    MAX_NEXT_CHARS,
    MAX_TEXT_CHARS,
    RanksRequest,
    parse_question,
)
from dashboard.ranks.time_grid import COLUMNS
from stepscope.run import RunError, process_identity, rank_json, read_run, write_run_json
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


class Tab:
    """What a tab does with the answers: it asks again while there is more."""

    def __init__(self, folder: Path, jobs: Jobs | None = None) -> None:
        self.jobs = jobs or Jobs()
        self.folder = folder
        self.question = RanksRequest()
        self.named: dict[str, Any] = {}
        self.shown: dict[str, Any] = {}
        self.columns: dict[int, int] = {}
        self.most_bytes = 0
        self.said: dict[str, Any] = {"verdict": None}

    def ask(self, **change: Any) -> dict[str, Any]:
        question = replace(self.question, **change)
        answer = ranks_answer(self.jobs, self.folder, question, lambda _run: self.said)
        text = json.dumps(answer, separators=(",", ":"), allow_nan=False)
        self.most_bytes = max(self.most_bytes, len(text))
        if "ranks" in answer:
            self.named = answer
        if "table" in answer:
            self.shown = answer
        if "columns" in answer:
            if answer["columns"] != self.question.columns:
                self.columns = {}
            for at in answer.get("strip", {"at": []})["at"]:
                self.columns[at] = self.columns.get(at, 0) + 1
            self.question = RanksRequest(
                metric=answer["metric"] or "",
                columns=answer["columns"],
                seen=answer["seen"],
                who=answer["who"],
                axis=self.question.axis,
            )
        return answer

    def settle(self) -> None:
        answer = self.ask()
        while answer["more"]:
            answer = self.ask(only_strips=bool(self.shown) and "columns" in answer)
        self.ask()


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path, 2)
    for rank in range(2):
        made.add(rank)
        made.steps(rank, 1, 41, time=0.1, wait=0.02 * rank, loss=1.0 + rank)
    return made


def test_a_job_is_told_with_names_table_and_strips(job: JobFolder) -> None:
    tab = Tab(job.folder)
    tab.settle()
    host = process_identity()["host"]
    assert tab.named["hosts"] == [host]
    assert tab.named["ranks"] == [[0, 0, 0, "CPU"], [1, 1, 0, "CPU"]]
    assert (tab.named["missing"], tab.named["left_out"]) == ({}, 0)
    table = tab.shown["table"]
    assert (table["step"], table["time"], table["wait"]) == ([40, 40], [0.1, 0.1], [0, 20])
    assert table["data"] == table["memory"] == [None, None]
    assert tab.shown["state"] == "aa"
    assert tab.shown["metrics"] == [TIME, WAIT, "train/loss"]
    assert set(tab.columns) == set(range(17))  # 4.1 s of 0.25 s


def test_a_rank_without_a_row_has_no_last_step(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 2)
    for rank in range(2):
        job.add(rank)
    job.steps(1, 0, 1, time=0.1)
    tab = Tab(job.folder)
    tab.settle()
    assert tab.shown["table"]["step"] == [None, 0]


def test_the_strips_can_be_over_steps_each_rank_by_its_own(job: JobFolder) -> None:
    job.steps(1, 41, 200, time=0.3)  # a rank that counts on
    tab = Tab(job.folder)
    tab.settle()
    tab.question = replace(tab.question, axis="step")  # what it has is over time
    answer = tab.ask()
    assert answer["width"] == 2  # 200 steps in 120 columns
    at = answer["strip"]["at"]
    assert set(at) == set(range(100))
    kept = tab.jobs._jobs[(job.folder, CREATED)].columns["step"]
    first, second = kept.values(TIME, np.arange(100)).T
    assert np.flatnonzero(np.isfinite(first)).tolist() == list(range(21))
    assert second[[0, 20, 21, 99]] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert tab.ask()["strip"]["at"] == []
    tab.question = replace(tab.question, axis="time")
    assert tab.ask()["strip"]["at"] != []


def test_only_new_rows_are_read_and_only_changed_columns_sent(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab = Tab(job.folder)
    tab.settle()
    read: list[int] = []
    take = RankCache._take

    def noted(
        self: RankCache, rank: Any, block: SeriesBlock, newest: SeriesBlock, *, afresh: bool
    ) -> None:
        read.append(len(block))
        take(self, rank, block, newest, afresh=afresh)

    monkeypatch.setattr(RankCache, "_take", noted)
    assert tab.ask()["strip"]["at"] == []
    assert read == []  # no store has changed
    job.steps(1, 41, 44, time=0.3)
    answer = tab.ask()
    assert read == [3]
    assert answer["strip"]["at"] == [16, 17]
    assert answer["table"]["step"] == [40, 43]
    assert "ranks" not in answer
    other = Tab(job.folder, tab.jobs)  # a second tab has all, from what is kept
    other.settle()
    assert read == [3]
    assert set(other.columns) == set(range(18))


def test_what_did_not_fit_into_the_time_is_read_by_the_next_questions(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.ranks.rank_cache.BUDGET_S", 0.0)
    monkeypatch.setattr("dashboard.ranks.rank_cache.FIRST_BUDGET_S", 0.0)
    for rank in range(2):
        job.steps(rank, 1, 41, allocated=2.0**30)
    tab = Tab(job.folder)
    tab.settle()
    for rank in range(2):
        job.steps(rank, 41, 44, time=0.3)
        job.steps(rank, 41, 44, allocated=2.0**31)
    for _ in range(4):
        tab.ask()
    assert tab.shown["table"]["step"] == [43, 43]
    assert tab.shown["table"]["memory"] == [2048, 2048]


def test_each_series_has_its_turn_where_time_is_always_up(job: JobFolder) -> None:
    read = RankCache(read_run(job.folder))
    for step in range(41, 101, 10):
        for rank in range(2):
            job.steps(rank, step, step + 10, time=0.1)
            job.steps(rank, step, step + 10, allocated=float(step))
        for _ in range(2):
            read.look(budget_s=0.0)
    assert [each.last("memory/allocated") for each in read.figures()] == [81.0, 81.0]
    assert min(len(each.rows[TIME]) for each in read.figures()) >= 80


def test_another_metric_is_sent_from_the_beginning(job: JobFolder) -> None:
    tab = Tab(job.folder)
    tab.settle()
    answer = tab.ask(metric="train/loss")
    assert answer["metric"] == "train/loss"
    assert len(answer["strip"]["at"]) == 17
    assert tab.ask()["strip"]["at"] == []
    assert tab.ask(metric="no/such")["metric"] == TIME


def test_ranks_without_a_file_are_named_by_how_they_stand(tmp_path: Path) -> None:
    job = JobFolder(tmp_path, 8)
    for rank in (0, 1, 2, 3, 4, 6, 7):
        job.add(rank)
    tab = Tab(job.folder)
    tab.settle()
    assert tab.named["world_size"] == 8
    assert tab.named["missing"] == {"never started": [5]}
    job.add(5)
    tab.settle()
    assert tab.named["missing"] == {}
    assert len(tab.named["ranks"]) == 8


def test_a_dead_rank_is_told_with_its_last_sign_of_life(job: JobFolder) -> None:
    beat = time.time() - 60
    job.add(1, host="elsewhere", heartbeat=beat, pid=1)
    os.utime(job.folder / "rank1.json", (beat, beat))
    tab = Tab(job.folder)
    tab.settle()
    assert tab.shown["state"] == "ac"
    ((row, seconds, reason),) = tab.shown["ends"]
    assert (row, reason) == (1, None)
    assert seconds == pytest.approx(beat - CREATED, abs=0.1)


def test_the_gpus_that_one_rank_samples_are_shown_with_those_that_train_on_them(
    tmp_path: Path,
) -> None:
    job = JobFolder(tmp_path, 2)
    gpus = [{"uuid": "GPU-a", "name": "x"}, {"uuid": "GPU-b", "name": "x"}]
    job.add(0, device="GPU-b", devices=gpus)
    job.add(1, device="GPU-a", local_rank=1)
    job.device(0, "GPU-a", 10.0)
    job.device(0, "GPU-b", 90.0)
    tab = Tab(job.folder)
    tab.settle()
    assert [place for *_, place in tab.named["ranks"]] == ["GPU 1", "GPU 0"]
    kept = tab.jobs._jobs[(job.folder, CREATED)]
    values = kept.columns["time"].values(UTIL, np.arange(2))
    assert values.tolist() == [[90.0, 10.0], [90.0, 10.0]]


def test_answers_stay_small_for_many_ranks_and_long_runs(tmp_path: Path) -> None:
    ranks = 70
    job = JobFolder(tmp_path, ranks)
    for rank in range(ranks):
        job.add(rank, host=f"a-long-name-of-a-host-{rank // 8}", local_rank=rank % 8)
        job.steps(rank, 1, 400, time=0.123456, wait=0.0123, loss=1.0)
        job.steps(rank, 1, 400, allocated=123456789012.0)
    tab = Tab(job.folder)
    verdict = {
        "kind": "hang",
        "ranks": list(range(MAX_NAMED_RANKS)),
        "phase": "communication",
        "share": 0.5,
    }
    verdict |= {"text": "x" * MAX_TEXT_CHARS, "next": "x" * MAX_NEXT_CHARS}
    tab.said = {"verdict": verdict}
    tab.settle()
    assert {key: tab.shown[key] for key in tab.said} == tab.said
    assert len(tab.named["ranks"]) == MAX_RANKS_SHOWN
    assert tab.named["left_out"] == ranks - MAX_RANKS_SHOWN
    assert tab.most_bytes <= 5000
    assert len(tab.columns) == 80  # 40 s: two columns of 0.25 s became one
    assert max(tab.columns.values()) == 1  # each was sent once
    tab.question = replace(tab.question, axis="step")
    tab.settle()
    assert tab.most_bytes <= 5000
    assert len(tab.columns) == 100  # 399 steps: a column is four
    assert max(tab.columns.values()) == 1


def test_a_long_run_is_read_as_an_overview() -> None:
    for rows in (1, 2048, 100_000, 10_000_000):
        bucket = overview_bucket(rows)
        assert rows // bucket < 16 * COLUMNS
        assert bucket == 1 or rows // bucket >= COLUMNS // 2


def test_files_that_others_have_written_break_nothing(job: JobFolder) -> None:
    for number, text in enumerate(("[]", "{}", "nonsense", '{"heartbeat": "x", "status": 1}'), 2):
        (job.folder / f"rank{number}.json").write_text(text)
    (job.folder / "rank6.json").write_text("[" * 100_000)
    (job.folder / "rank2.sqlite").write_bytes(b"x" * 5000)
    (job.folder / "rank-1.json").write_text("{}")
    job.add(1, rank=10**30, local_rank=-1, device={"a": 1}, reason=["no"], host="\x1b[31m" * 99)
    job.steps(0, 41, 42, time=float("inf"), wait=float("nan"))
    tab = Tab(job.folder)
    tab.settle()
    assert [number for number, *_ in tab.named["ranks"]] == [0, 1, 2, 3, 4, 5, 6]
    assert tab.named["ranks"][1][1] == 1
    assert tab.shown["state"] == "aappppp"
    assert "\x1b" not in tab.named["hosts"][1]
    assert tab.most_bytes <= MAX_BYTES + 200


@pytest.mark.parametrize("ended", [10**400, float("nan"), -1e300, True, "1"], ids=range(5))
def test_a_time_that_can_be_none_is_not_the_end_of_a_rank(job: JobFolder, ended: Any) -> None:
    job.add(1, ended=ended, status="finished")
    member = read_member(job.folder, 1)
    assert member is not None
    assert member.ended == pytest.approx(time.time(), abs=60), "when it was last heard of"
    tab = Tab(job.folder)
    tab.settle()
    assert tab.shown["state"][1] == "f"
    job.add(0, ended=ended, status="finished")
    assert abs(Tab(job.folder).ask()["now"] + CREATED - time.time()) < 60


@pytest.mark.parametrize("size", ["8", None, -1, 10**12, True, 8.0, [8]])
def test_a_world_size_that_is_none_counts_as_one_process(tmp_path: Path, size: Any) -> None:
    job = JobFolder(tmp_path, 1)
    job.add(0, world_size=size)
    tab = Tab(job.folder)
    tab.settle()
    assert (tab.named["world_size"], tab.named["missing"]) == (1, {})


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        ranks_answer(Jobs(), tmp_path, RanksRequest())


def test_a_question_is_read_with_care() -> None:
    query = {"metric": TIME, "columns": "ab-1", "seen": "7", "who": "c", "only_strips": "1"}
    assert parse_question(query.items()) == RanksRequest(TIME, "ab-1", 7, "c", True)
    assert parse_question([]) == RanksRequest()
    assert parse_question([("axis", "step")]).axis == "step"
    with pytest.raises(ValueError, match="axis: must be time or step"):
        parse_question([("axis", "x")])
    for seen in ("-1", "x", "9" * 16):
        with pytest.raises(ValueError, match="seen"):
            parse_question([("seen", seen)])
