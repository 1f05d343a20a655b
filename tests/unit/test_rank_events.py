"""The page gets what all ranks tell, although each writes a store of its own, and each once."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from dashboard.charts import series
from dashboard.charts.rank_events import PERIOD_S, RankEvents
from stepscope.run import RunInfo, RunStatus, write_run_json
from stepscope.store import StoreWriter, store_name


class Ranks:
    """A run of three ranks, and the page's reader with a clock of the test."""

    def __init__(self, folder: Path, world_size: Any = 3) -> None:
        self.now = 0.0
        self.folder = folder
        told = {"world_size": world_size, "created": 0.0}
        self.run = RunInfo(folder, RunStatus.RUNNING, None, 0.0, told)
        for rank in range(3):
            StoreWriter(folder / store_name(rank)).close()
        self.events = RankEvents(lambda: self.now, budget_s=10.0)
        self.seen = ""

    def write(self, rank: int, ts: float, rule: str, kind: str = "alert", **data: Any) -> None:
        path = self.folder / store_name(rank)
        with closing(StoreWriter(path, reopen=True)) as store, store.transaction():
            store.add_event(ts, 7, 0, kind, f"{rule}!", {"rule": rule, **data})

    def shown(self) -> list[tuple[str, str, int]]:
        told, self.seen = self.events.of(self.run, self.seen)
        events = series.rank_events(told, self.run)
        return [(event["id"], event["text"], event["data"]["rank"]) for event in events]


def test_alerts_of_other_ranks_come_with_their_rank_and_in_order(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    (tmp_path / "rank9.sqlite").write_bytes(b"x" * 5000)
    ranks.write(0, 1.0, "of_rank_0")
    ranks.write(2, 3.0, "hot")
    ranks.write(1, 2.0, "run_failed")
    ranks.write(1, 2.5, "epoch", kind="epoch")
    ranks.write(1, 2.6, "no_step")  # a job that hangs: rank 0 has it too
    first = [("rank1-1", "Rank 1: run_failed!", 1), ("rank2-1", "Rank 2: hot!", 2)]
    assert ranks.shown() == first
    ranks.write(1, 4.0, "hot")
    assert ranks.shown() == []  # the stores are not asked at each poll
    ranks.now = PERIOD_S
    assert ranks.shown() == [("rank1-4", "Rank 1: hot!", 1)]


def test_each_tab_is_sent_an_event_once_and_all_of_them_at_first(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.write(1, 1.0, "hot")
    assert len(ranks.shown()) == 1
    assert ranks.shown() == []
    for seen in ("", "other~5", "other~x", "~~"):  # a new tab, one of another server, nonsense
        told, _ = ranks.events.of(ranks.run, seen)
        assert [event.step for _, event in told] == [7]


def test_results_of_commands_come_from_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.write(1, 1.0, "freed", kind="empty_cache", command_id=9, ok=True)
    ranks.write(2, 1.0, "freed", kind="empty_cache", command_id=9, ok=True)
    ranks.write(2, 2.0, "by the script", kind="mark")
    assert [text for _, text, _ in ranks.shown()] == ["Rank 1: freed!", "Rank 2: freed!"]


def test_a_poll_asks_as_many_ranks_as_fit_into_its_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.write(1, 1.0, "hot")
    ranks.write(2, 2.0, "hot")
    ranks.events = RankEvents(lambda: ranks.now, budget_s=0.0)
    assert [[rank for _, _, rank in ranks.shown()] for _ in range(3)] == [[1], [2], []]


def test_a_run_of_one_process_asks_no_other_store(tmp_path: Path) -> None:
    for number, world_size in enumerate((1, None, "3")):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks = Ranks(folder, world_size)
        ranks.write(1, 1.0, "hot")
        assert ranks.shown() == []


def test_ranks_are_named_by_torchs_number_also_on_a_second_host(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    told = {"status": "running", "heartbeat": time.time(), "rank": 9, "world_size": 16}
    write_run_json(tmp_path, told, "rank1.json")
    ranks.write(1, 1.0, "hot")
    ranks.write(2, 2.0, "hot")
    assert ranks.shown() == [("rank1-1", "Rank 9: hot!", 9), ("rank2-1", "Rank 2: hot!", 2)]
