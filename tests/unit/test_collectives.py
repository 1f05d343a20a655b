"""Bytes and time of collectives by step, from entries and at times that a test sets."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stepscope.common.metrics import BY_KEY
from stepscope.distributed import collective_metrics
from stepscope.distributed.collective_metrics import (
    KEYS,
    CollectiveMetrics,
)
from tests.support.fake_nvml import FakeClock
from tests.support.flight_recorder import content, entry

BYTES = 256
"""Of the tensor in `entry`."""


class Job:
    """A rank whose recorder a test fills: `step` enqueues and ends a step of the training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.entries: list[dict[str, Any]] = []
        self.reads = 0
        self.records = self.steps = 0
        self.kept = 2000
        self.collectives = CollectiveMetrics(clock=self.clock, wall=self.clock)
        self.collectives.step = lambda: self.steps
        monkeypatch.setattr(collective_metrics, "dumps", self._dumps)
        monkeypatch.setattr(collective_metrics, "rank_and_size", lambda: (0, 2))
        monkeypatch.setattr(collective_metrics, "_captures", lambda: False)

    def _dumps(self) -> dict[str, Any]:
        self.reads += 1
        return {"_dump_fr_trace": content(*self.entries)}

    def enqueue(self, name: str = "gloo:all_reduce", **fields: Any) -> None:
        self.entries.append(entry(self.records, name, **fields))
        self.entries = self.entries[-self.kept :]
        self.records += 1

    def step(self, count: int = 3, name: str = "gloo:all_reduce", **fields: Any) -> None:
        for _ in range(count):
            self.enqueue(name, **fields)
        self.steps += 1
        self.clock.now += 0.1

    def take(self) -> dict[str, float]:
        self.collectives.read()
        return self.collectives.take()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(monkeypatch)
    job.step(7)  # what the job does once, such as sending the weights round
    assert job.take() == {}
    return job


def later(job: Job, steps: int = 10, count: int = 3, name: str = "gloo:all_reduce") -> None:
    for _ in range(steps):
        job.step(count, name)


def test_bytes_of_a_step_and_a_second(job: Job) -> None:
    assert [BY_KEY[key].stream for key in KEYS] == ["samples"] * len(KEYS)
    later(job, 10)
    assert job.take() == pytest.approx({"comm/bytes": 3 * BYTES, "comm/rate": 30 * BYTES})
    assert job.collectives.take() == {}  # once
    assert job.collectives.reasons() == {}
    later(job, 20, count=0)
    assert job.take() == {"comm/bytes": 0.0, "comm/rate": 0.0}  # a real zero


def test_a_job_that_records_nothing_has_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for _ in range(3):
        later(job, 10, count=0)
        assert job.take() == {}
    assert set(job.collectives.reasons()) == set(KEYS)
    monkeypatch.setitem(os.environ, "TORCH_FR_BUFFER_SIZE", "0")
    later(job, 10, count=0)
    job.take()
    assert job.collectives.reasons()["comm/bytes"] == collective_metrics.SWITCHED_OFF


def test_nothing_is_read_in_a_pause_and_before_it_is_due(job: Job) -> None:
    reads = job.reads
    job.clock.now += 60.0
    assert job.take() == {}
    job.step()
    assert job.take()["comm/bytes"] == 3 * BYTES
    job.step()
    assert job.take() == {}
    assert job.reads == reads + 1


def test_a_message_counts_where_it_is_sent(job: Job) -> None:
    job.enqueue("nccl:send 0->1", is_p2p=True)
    job.enqueue("nccl:recv 0<-1", is_p2p=True)
    later(job, 10, count=0)
    assert job.take()["comm/bytes"] == pytest.approx(BYTES / 10)


def test_overwritten_collectives_count_as_the_others(job: Job) -> None:
    job.kept = 20
    later(job, 10, count=10)
    assert job.take()["comm/bytes"] == pytest.approx(10 * BYTES)


def test_an_error_of_torch_is_the_reason(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no such buffer")

    monkeypatch.setattr(collective_metrics, "dumps", fail)
    later(job, 10)
    assert job.take() == {}
    assert job.collectives.reasons()["comm/bytes"] == "RuntimeError: no such buffer"
    assert not job.collectives.is_due()
