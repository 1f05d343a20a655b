"""The page gets the alerts and command results of all ranks, although each has its own store."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dashboard.charts.ranks import read_rank_events, unseen
from stepscope.run import RunInfo, RunStatus, write_run_json
from stepscope.store import StoreWriter, store_name
from stepscope.store.blocks import Event


class Ranks:
    """A run of three ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunInfo(folder, RunStatus.RUNNING, None, 0.0, {"world_size": 3, "created": 0.0})
        for rank in range(3):
            StoreWriter(folder / store_name(rank)).close()

    def write(self, rank: int, ts: float, rule: str, kind: str = "alert", **data: Any) -> None:
        path = self.folder / store_name(rank)
        with closing(StoreWriter(path, reopen=True)) as store, store.transaction():
            store.add_event(Event(ts, 7, 0, kind, f"{rule}!", {"rule": rule, **data}))

    def shown(self) -> list[tuple[str, str, int]]:
        events = read_rank_events(self.run)
        return [(event["id"], event["text"], event["data"]["rank"]) for event in events]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_alerts_of_other_ranks_come_with_their_rank_and_in_order(ranks: Ranks) -> None:
    (ranks.folder / "rank9.sqlite").write_bytes(b"x" * 5000)
    ranks.write(0, 1.0, "of_rank_0")
    ranks.write(2, 3.0, "hot")
    ranks.write(1, 2.0, "run_failed")
    for number in range(300):  # a rank records every epoch
        ranks.write(1, 2.5 + number / 1000, "epoch", kind="epoch")
    ranks.write(1, 2.6, "no_step")  # a job that hangs: rank 0 has it too
    first = [("rank1-1", "Rank 1: run_failed!", 1), ("rank2-1", "Rank 2: hot!", 2)]
    assert ranks.shown() == first


def test_only_refused_commands_of_other_ranks_are_listed(ranks: Ranks) -> None:
    ranks.write(1, 1.0, "freed", kind="empty_cache", command_id=9, ok=True)
    ranks.write(2, 1.0, "refused", kind="empty_cache", command_id=9, ok=False)
    ranks.write(2, 2.0, "by the script", kind="mark")
    assert [text for _, text, _ in ranks.shown()] == ["Rank 2: refused!"]


def test_ranks_are_named_by_torchs_number_also_on_a_second_host(ranks: Ranks) -> None:
    rank = {"status": "running", "heartbeat": time.time(), "rank": 9, "world_size": 16}
    write_run_json(ranks.folder, rank, "rank1.json")
    ranks.write(1, 1.0, "hot")
    assert ranks.shown() == [("rank1-1", "Rank 9: hot!", 9)]


def test_a_tab_is_sent_the_events_only_if_there_are_new_ones(ranks: Ranks) -> None:
    ranks.write(1, 1.0, "hot")
    events = read_rank_events(ranks.run)
    shown, seen = unseen(events, "")
    assert shown == events
    assert unseen(events, seen) == ([], seen)
    ranks.write(2, 2.0, "hot")
    assert len(unseen(read_rank_events(ranks.run), seen)[0]) == 2
