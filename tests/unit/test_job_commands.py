"""The agreement's threads and files: two ranks in one process, each with its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from stepscope.session import job_commands
from stepscope.session.job_commands import JobCommands
from stepscope.store.commands import Command, CommandName
from stepscope.store.recorder import Recorder
from tests.support.fake_recorder import FakeRecorder
from tests.support.waiting import wait_until

PATIENCE_S = 20.0


class TellingRecorder(FakeRecorder):
    """Tells the test of a request and of a result."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, number, step=10 * number)
        self.flagged, self.over = threading.Event(), threading.Event()

    @property
    def texts(self) -> list[str]:
        return [text for _, text, _ in self.events]

    def request_boundary(self) -> None:
        self.flagged.set()

    def event(self, kind: str, text: str, **data: Any) -> None:
        super().event(kind, text, **data)
        self.over.set()


class Rank:
    """A rank that trains on request."""

    def __init__(self, folder: Path, number: int) -> None:
        self.recorder = TellingRecorder(folder, number)
        self.commands = JobCommands(
            cast(Recorder, self.recorder),
            2,
            lead=1,
            step=lambda: self.recorder.step,
            on_command=lambda command: None,
            on_withdrawn=lambda command: False,
        )

    def train_until_served(self) -> tuple[int, Command]:
        """Take steps to the first boundary that has something to serve."""
        assert self.recorder.flagged.wait(PATIENCE_S)
        while True:
            self.recorder.step += 1
            while (command := self.commands.take()) is None and not self.commands.may_leave():
                self.commands.wait(PATIENCE_S)
            if command is not None:
                self.recorder.finish(command, f"served {command.id}")
                return self.recorder.step, command


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    for name in ("run.json", "rank1.json"):  # in this process both ranks live
        content = {"status": "running", "heartbeat": time.time()}
        (tmp_path / name).write_text(json.dumps(content))
    made = [Rank(tmp_path, number) for number in range(2)]
    yield made
    for rank in made:
        rank.commands.close()


COMMAND = Command(7, CommandName.EMPTY_CACHE, {"text": "é"})


def test_a_command_is_served_at_the_highest_vote(ranks: list[Rank]) -> None:
    ranks[0].commands.offer(COMMAND)
    assert ranks[1].train_until_served() == (11, COMMAND)
    assert ranks[0].train_until_served() == (11, COMMAND)
    assert all(rank.commands.may_leave() for rank in ranks)


def test_many_commands_at_once_are_all_served_in_order(ranks: list[Rank]) -> None:
    count = 40
    for number in range(count):
        ranks[0].commands.offer(Command(number, CommandName.EMPTY_CACHE, {}))
    trainings = [threading.Thread(target=serve, args=(rank, count)) for rank in ranks]
    for training in trainings:
        training.start()
    for training in trainings:
        training.join()
    for rank in ranks:
        assert rank.recorder.texts == [f"served {number}" for number in range(count)]


def serve(rank: Rank, count: int) -> None:
    for _ in range(count):
        rank.train_until_served()


def test_a_decision_that_the_disk_refuses_is_withdrawn(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = job_commands.atomic_write

    def refuse(path: Path, content: bytes, *, durable: bool) -> None:
        if b'"step":11' in content:
            raise OSError("no space left")
        write(path, content, durable=durable)

    monkeypatch.setattr(job_commands, "atomic_write", refuse)
    ranks[0].commands._coordinator._vote_timeout_s = 0.5
    ranks[0].commands.offer(COMMAND)
    assert ranks[0].recorder.over.wait(PATIENCE_S)
    (text,) = ranks[0].recorder.texts
    assert text == "Empty cache: withdrawn on all ranks: rank 0 has not answered for 0.5 s"
    wait_until(lambda: not any(rank.commands.waiting for rank in ranks), PATIENCE_S)


def test_the_end_of_number_0_withdraws_what_is_open(ranks: list[Rank]) -> None:
    ranks[1].commands.close()
    ranks[0].commands.offer(COMMAND)
    assert ranks[0].recorder.flagged.wait(PATIENCE_S)
    ranks[0].commands.close()
    assert ranks[0].recorder.texts == ["Empty cache: withdrawn on all ranks: the run has ended"]
