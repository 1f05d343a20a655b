"""The difference of two hosts' clocks lies in the interval that the order of events allows."""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.recording.recorder import Recorder
from stepscope.run import RunStatus, read_run, write_run_json
from stepscope.run.clocks import (
    WINDOW_S,
    Bounds,
    ClockOffset,
    offset_between,
    offset_of,
    read_clocks,
    write_clock,
)
from stepscope.run.rank_files import read_rank_file
from stepscope.session import clock_exchange
from stepscope.session.clock_exchange import ClockExchange


@pytest.mark.parametrize("ahead_s", [0.0, 3.0, -7200.0])
@pytest.mark.parametrize("late_s", [0.001, 30.0], ids=["local disk", "disk that shows late"])
def test_the_truth_lies_in_the_interval(ahead_s: float, late_s: float) -> None:
    """Two hosts write at random times and see what the other wrote up to `late_s` later."""
    chance = random.Random(7)
    seen_by = {"a": Bounds(), "b": Bounds()}
    clock = {"a": 0.0, "b": ahead_s}
    at = 1e9
    for _ in range(200):
        at += chance.uniform(0.1, 0.4)
        reader, writer = chance.sample(["a", "b"], 2)
        written = at - chance.uniform(0.0, late_s)
        seen_by[reader].add(written + clock[writer], at + clock[reader])
    found = offset_between(seen_by["b"].best, seen_by["a"].best)
    assert abs(found.offset_s - ahead_s) <= found.uncertainty_s
    assert found.uncertainty_s <= late_s


def test_a_bound_gets_old() -> None:
    bounds = Bounds()
    bounds.add(100.0, 100.1)
    bounds.add(110.0, 111.0)
    assert bounds.best == pytest.approx(-0.1)
    bounds.add(100.0 + WINDOW_S, 101.0 + WINDOW_S)
    assert bounds.best == pytest.approx(-1.0)


def test_one_side_alone_tells_nothing_nor_do_bounds_that_contradict() -> None:
    with pytest.raises(ValueError, match="read the other's file"):
        offset_between(None, -0.1)
    with pytest.raises(ValueError, match="was set"):
        offset_between(5.0, -0.1)


class Host:
    """A process of one host, whose clock is ahead of the test's."""

    def __init__(self, folder: Path, name: str, rank: int, ahead_s: float, writes: bool) -> None:
        self.name, self.ahead_s = name, ahead_s
        self.recorder = Recorder(folder, name="job", rank=rank)
        self.recorder.describe(host=name)
        self.exchange = ClockExchange(self.recorder, writes=writes)
        self.exchange._host = name

    def look(self, monkeypatch: pytest.MonkeyPatch, now: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(clock_exchange, "clock", SimpleNamespace(now=lambda: now + self.ahead_s))
            self.exchange._look()

    @property
    def found(self) -> ClockOffset | None:
        return offset_of(self.recorder.described())


def test_every_process_of_a_host_knows_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [
        Host(tmp_path, "node1", 0, 0.0, writes=True),
        Host(tmp_path, "node2", 1, 12.0, writes=True),
        Host(tmp_path, "node2", 2, 12.0, writes=False),
    ]
    write_run_json(tmp_path, hosts[0].recorder.described())
    try:
        for tick in range(20):
            for index, host in enumerate(hosts):
                host.look(monkeypatch, 1e9 + tick * 0.25 + index * 0.01)
        assert hosts[0].found == ClockOffset(0.0, 0.0)
        for host in hosts[1:]:
            assert host.found is not None
            assert abs(host.found.offset_s - 12.0) <= host.found.uncertainty_s <= 0.25
        assert set(read_clocks(tmp_path)) == {"node1", "node2"}
    finally:
        for host in hosts:
            host.recorder.close(host.recorder.run_json["status"])


def test_broken_files_of_hosts_are_left_out(tmp_path: Path) -> None:
    write_clock(tmp_path, "node/1", {"sent": 1.0, "seen": {}})
    for number, text in enumerate(("", "[]", "{}", "null")):
        (tmp_path / f"clock-{number}.json").write_text(text)
    assert list(read_clocks(tmp_path)) == ["node/1"]


def test_ends_and_heartbeats_are_by_the_clock_of_number_0(tmp_path: Path) -> None:
    """The clock of rank 1's host is an hour ahead: its failure was first all the same."""
    base = {"created": 1.0, "world_size": 2, "host": "node1", "status": "failed"}
    own = {"rank": 0, "heartbeat": 1002.0, "ended": 1002.0, "reason": "OSError: later"}
    write_run_json(tmp_path, base | own)
    other = {"rank": 1, "heartbeat": 4601.0, "ended": 4601.0, "reason": "ValueError: first"}
    clock = {"clock_offset_s": 3600.0, "clock_uncertainty_s": 0.01, "host": "node2"}
    write_run_json(tmp_path, base | other | clock, "rank1.json")
    assert read_run(tmp_path).reason == "Rank 1 (node2): ValueError: first"
    alive = json.loads((tmp_path / "rank1.json").read_text()) | {"status": "running"}
    write_run_json(tmp_path, alive, "rank1.json")
    end = read_rank_file(tmp_path, 1)
    assert end.beat <= (tmp_path / "rank1.json").stat().st_mtime, "not an hour from now"


@pytest.mark.parametrize("ahead_s", [300.0, -300.0])
@pytest.mark.parametrize("stamped_by_writer", [True, False])
def test_the_time_of_a_file_may_be_by_the_clock_of_its_host_or_of_the_disk(
    tmp_path: Path, ahead_s: float, stamped_by_writer: bool
) -> None:
    """The last heartbeat was 60 s ago, and is no later by any of both."""
    beat = time.time() - 60.0
    told = {"status": "running", "heartbeat": beat + ahead_s, "host": "node2", "rank": 1}
    told |= {"clock_offset_s": ahead_s, "clock_uncertainty_s": 0.01}
    write_run_json(tmp_path, told, "rank1.json")
    os.utime(tmp_path / "rank1.json", (beat + ahead_s * stamped_by_writer,) * 2)
    rank = read_rank_file(tmp_path, 1)
    assert rank.beat == pytest.approx(beat, abs=0.01)
    assert rank.status is RunStatus.CRASHED


@pytest.mark.parametrize("offset", [math.nan, math.inf, "1", None])
def test_an_offset_that_can_be_none_is_left_out(offset: object) -> None:
    assert offset_of({"clock_offset_s": offset, "clock_uncertainty_s": 0.01}) is None
