"""The agreement's threads and files: two ranks in one process, each with its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands.command import Command, CommandName
from stepscope.commands.consensus import FOLDER, NOTICES
from stepscope.commands.job_queue import JobCommandQueue, RankResults

ALIVE = json.dumps({"status": "running", "heartbeat": time.time()})
PATIENCE_S = 20.0


class Rank:
    """A rank that trains when it is told to, and notes what it hears."""

    def __init__(self, folder: Path, number: int) -> None:
        self.step = 10 * number
        self.flagged = threading.Event()
        self.over = threading.Event()
        self.why: list[str] = []
        self.told: list[RankResults] = []
        self.wishes: list[str] = []
        self.commands = JobCommandQueue(
            folder, number, 2, self, step=lambda: self.step, lead=1, flag=self.flagged.set
        )

    def heard(self, command: Command) -> None:
        pass

    def withdrawn(self, command: Command, why: str) -> None:
        self.why.append(why)
        self.over.set()

    def refused(self, command: Command, why: str) -> None:
        self.withdrawn(command, why)

    def waits(self, waiting: Mapping[str, Any] | None) -> None:
        pass

    def results(self, command: Command, results: RankResults) -> None:
        self.told.append(results)
        self.over.set()

    def stop_wanted(self, reason: str) -> None:
        self.wishes.append(reason)
        self.over.set()

    def train_until_served(self) -> tuple[int, list[Command]]:
        """Take steps to the first boundary that has something to serve."""
        assert self.flagged.wait(PATIENCE_S)
        while True:
            self.step += 1
            served = self.commands.take()
            while not served and not self.commands.may_leave():
                served = self.commands.wait(PATIENCE_S)
            if served:
                for command in served:
                    self.commands.ended(command, True, {"after": {"process/rss": 1.0}})
                return self.step, served


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    made = [Rank(tmp_path, number) for number in range(2)]
    yield made
    for rank in made:
        rank.commands.close()


def test_a_command_is_served_at_the_highest_answer_and_number_0_hears_of_all(
    ranks: list[Rank], tmp_path: Path
) -> None:
    for number in range(2):  # in this process both ranks live
        name = "run.json" if number == 0 else "rank1.json"
        (tmp_path / name).write_text(ALIVE)
    ranks[0].commands.offer(Command(7, CommandName.MARK, {"text": "é"}))
    step, served = ranks[1].train_until_served()
    assert (step, served) == (11, [Command(7, CommandName.MARK, {"text": "é"})])
    assert ranks[0].train_until_served() == (11, served)
    assert all(rank.commands.may_leave() for rank in ranks)
    assert ranks[0].over.wait(PATIENCE_S)
    assert sorted(ranks[0].told[0]) == [0, 1]


def test_many_commands_at_once_are_all_told(ranks: list[Rank], tmp_path: Path) -> None:
    count = 40
    for name in ("run.json", "rank1.json"):
        (tmp_path / name).write_text(ALIVE)
    for number in range(count):
        ranks[0].commands.offer(Command(number, CommandName.MARK, {}))
    for rank in reversed(ranks):
        served = 0
        while served < count:
            served += len(rank.train_until_served()[1])
    while len(ranks[0].told) < count:
        assert ranks[0].over.wait(PATIENCE_S), f"{len(ranks[0].told)} of {count} were told"
        ranks[0].over.clear()
    assert all(sorted(results) == [0, 1] for results in ranks[0].told)


def test_what_the_disk_refuses_is_withdrawn(ranks: list[Rank], tmp_path: Path) -> None:
    (tmp_path / FOLDER / NOTICES).mkdir()  # a file cannot take its place
    ranks[0].commands.offer(Command(7, CommandName.PAUSE, {}))
    assert ranks[0].over.wait(PATIENCE_S)
    assert ranks[0].why == ["the disk refuses the files of the agreement"]
    assert not ranks[0].commands.waiting


def test_the_end_of_number_0_withdraws_what_is_open(ranks: list[Rank]) -> None:
    ranks[1].commands.close()
    ranks[0].commands.offer(Command(7, CommandName.MARK, {}))
    assert ranks[0].flagged.wait(PATIENCE_S)
    assert ranks[0].commands.close() == [(None, Command(7, CommandName.MARK, {}))]
    assert not ranks[0].told


def test_number_0_hears_once_that_another_rank_wants_all_to_stop(ranks: list[Rank]) -> None:
    ranks[1].commands.want_stop("torchrun was told to stop.")
    assert ranks[0].over.wait(PATIENCE_S)
    ranks[0].commands.offer(Command(7, CommandName.MARK, {}))  # it looks again
    assert ranks[0].flagged.wait(PATIENCE_S)
    assert ranks[0].wishes == ["torchrun was told to stop."]
    assert not ranks[1].wishes
