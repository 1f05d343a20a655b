"""The hang of a job by the files of its ranks."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.diagnose import FRESH_S, hang_of
from stepscope.distributed.hangs.job_state import Hang, HangCause
from stepscope.distributed.hangs.record import HangRecord, hang_name
from stepscope.run import STALE_S, process_identity, rank_json, read_run, write_run_json


def write(folder: Path, number: int, now: float, **facts: object) -> None:
    """Write a rank's files as its host does."""
    told = {"created": now - 100, "status": "running", "heartbeat": now, "kind": "watch"}
    told |= {"rank": number, "world_size": 3} | process_identity()
    write_run_json(folder, told | facts, rank_json(number), durable=False)
    os.utime(folder / rank_json(number), (now, now))


def hangs(folder: Path, number: int, now: float, *, waits: bool) -> None:
    """Write the record of a rank that has waited for 8 s in all_reduce 9, or has left 8."""
    last = Collective(
        group="0",
        operation="all_reduce",
        sequence=9 if waits else 8,
        created_s=now - (8 if waits else 10),
        done=not waits,
    )
    record = HangRecord(
        number=number, rank=number, step=50, since=now - 9, seen=now, collectives=(last,)
    )
    path = folder / hang_name(number)
    path.write_text(json.dumps(asdict(record)))
    os.utime(path, (now, now))


def job(folder: Path, now: float, age_s: float = 0.0) -> Hang | None:
    """Let ranks 0 and 2 wait for 1."""
    for number in range(3):
        write(folder, number, now)
        hangs(folder, number, now - age_s, waits=number != 1)
    return hang_of(read_run(folder), now)


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    now = time.time()
    found = job(tmp_path, now)
    assert found is not None
    assert (found.cause, found.ranks, found.waiting) == (HangCause.NOT_ENTERED, (1,), (0, 2))
    assert found.since == pytest.approx(now - 9, abs=0.01)
    assert found.silent_s == pytest.approx(9, abs=0.01)


def test_a_host_whose_clock_was_set_right_is_not_silent(tmp_path: Path) -> None:
    """Its own times stay as they began; its heartbeat is right."""
    now = time.time()
    job(tmp_path, now)
    write(tmp_path, 2, now, host="node2", wall_offset_s=60.0)
    found = hang_of(read_run(tmp_path), now)
    assert found is not None
    assert (found.cause, found.ranks) == (HangCause.NOT_ENTERED, (1,))


def test_a_record_that_is_left_over_is_of_no_hang(tmp_path: Path) -> None:
    assert job(tmp_path, time.time(), FRESH_S + 1) is None


def test_a_rank_whose_heartbeat_has_stopped_is_gone(tmp_path: Path) -> None:
    now = time.time()
    job(tmp_path, now)
    write(tmp_path, 2, now - 2 * STALE_S, host="node2")
    (tmp_path / hang_name(2)).unlink()
    found = hang_of(read_run(tmp_path), now)
    assert found is not None
    assert (found.cause, found.ranks) == (HangCause.GONE, (2,))
