"""Why a job makes no step: records of real ranks that hung, on gloo and on the simulator's NCCL."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs.cases import (
    FRESH_S,
    PATIENCE_S,
    Hang,
    HangCause,
    RankObservation,
    find_hang,
    hang_of,
)
from stepscope.distributed.hangs.record import HangRecord, StackFrame, hang_name, read_record
from stepscope.run import STALE_S, process_identity, rank_json, read_run, write_run_json

DATA = Path(__file__).parents[1] / "data" / "hangs"


def recorded(case: str) -> list[RankObservation]:
    """Return the ranks of a hang as they wrote it."""
    found = [state(rank, read_record(DATA / case, rank)) for rank in range(2)]
    assert all(one.record for one in found)
    return found


def state(rank: int, record: HangRecord | None, lost: HangCause | None = None) -> RankObservation:
    process = f"process {100 + rank} on node1"
    return RankObservation(rank=rank, process=process, lost=lost, record=record)


def found_in(ranks: list[RankObservation], world_size: int = 0, *, ended: bool = False) -> Hang:
    found = find_hang(ranks, world_size or len(ranks), ended=ended)
    assert found is not None
    return found


def waits(rank: int, sequence: int = 7, group: str = "0", members: int = 4) -> HangRecord:
    """Return the record of a rank that waits in an all_reduce of 4 KiB."""
    one = Collective(group=group, operation="all_reduce", sequence=sequence, input_bytes=4096)
    groups = {"0": tuple(range(members))}
    return HangRecord(
        number=rank, rank=rank, step=3, since=0.0, seen=9.0, collectives=(one,), groups=groups
    )


def works(rank: int, last: int = 6, members: int = 4) -> HangRecord:
    """Return the record of a rank that has left its last collective and computes."""
    record = waits(rank, last, members=members)
    done = replace(record.collectives[0], done=True)
    frame = StackFrame(file="/home/me/train.py", line=30, function="load")
    return replace(record, collectives=(done,), frames=(frame,), phase="input")


def message(rank: int, text: str, group: str = "0", members: int = 2) -> HangRecord:
    """Return the record of a rank that waits for a message."""
    one = Collective(group=group, operation=text, sequence=None, input_bytes=400)
    return replace(waits(rank, members=members), collectives=(one,))


@pytest.mark.parametrize(
    ("case", "cause", "ranks", "phase", "operation"),
    [
        ("sleep-gloo", HangCause.NOT_ENTERED, (1,), None, "all_reduce #81 (16 B)"),
        ("sleep-nccl", HangCause.NOT_ENTERED, (1,), None, "all_reduce #81 (16 B)"),
        ("input-gloo", HangCause.NOT_ENTERED, (1,), "input", "all_reduce #81 (16 B)"),
        ("mismatch-nccl", HangCause.MISMATCH, (1,), "communication", "all_reduce #81 (16 B)"),
        ("order-gloo", HangCause.ORDER, (0, 1), "communication", "all_reduce #81 (400 B)"),
        ("receive-nccl", HangCause.ORDER, (0, 1), "communication", "recv 0<-1"),
        # gloo records no point-to-point operations.
        (
            "receive-gloo",
            HangCause.ORDER,
            (0, 1),
            "communication",
            "torch.distributed at hanging.py:92",
        ),
    ],
)
def test_recorded_hangs(
    case: str, cause: HangCause, ranks: tuple[int, ...], phase: str | None, operation: str
) -> None:
    found = found_in(recorded(case))
    assert (found.cause, found.ranks, found.phase) == (cause, ranks, phase)
    assert str(found.operation).startswith(operation)


def test_different_sizes_under_one_number() -> None:
    ranks = [state(rank, waits(rank)) for rank in range(4)]
    small = replace(waits(2).collectives[0], input_bytes=40)
    ranks[2] = state(2, replace(waits(2), collectives=(small,)))
    found = found_in(ranks)
    assert (found.cause, found.ranks, found.waiting) == (HangCause.MISMATCH, (2,), (0, 1, 3))


def test_a_collective_that_all_have_entered() -> None:
    found = found_in([state(rank, waits(rank, members=2)) for rank in range(2)])
    assert (found.cause, found.ranks) == (HangCause.ALL_ENTERED, (0, 1))


def test_the_end_of_a_chain_of_groups_is_named() -> None:
    """Rank 0 waits for 1 in one group, 1 for 2 in another; 2 reads data."""
    groups: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (1, 2)}
    records = (waits(0, 5, "a"), waits(1, 9, "b"), works(2))
    found = found_in([state(one.rank, replace(one, groups=groups)) for one in records])
    assert (found.cause, found.ranks, found.waiting) == (HangCause.NOT_ENTERED, (2,), (1,))
    assert found.operation == "all_reduce #9 of group b (4.00 KiB)"


def test_stacks_show_who_waits_if_there_are_no_collectives() -> None:
    """But not while a rank has no record, which may be the cause."""
    alone = [replace(works(rank, members=3), collectives=()) for rank in range(3)]
    alone[0] = replace(alone[0], phase="communication")
    alone[2] = replace(alone[2], phase="communication")
    ranks = [state(rank, record) for rank, record in enumerate(alone)]
    found = found_in(ranks)
    assert (found.cause, found.ranks, found.waiting) == (HangCause.NOT_ENTERED, (1,), (0, 2))
    assert find_hang([*ranks[:2], state(2, None)], 3) is None


@pytest.mark.parametrize("cause", [HangCause.GONE, HangCause.SILENT, HangCause.ENDED])
def test_a_process_that_explains_it(cause: HangCause) -> None:
    found = found_in([*(state(rank, waits(rank)) for rank in (0, 1, 3)), state(2, None, cause)])
    assert (found.cause, found.ranks) == (cause, (2,))
    assert "in all_reduce #7 (4.00 KiB): ranks 0, 1, 3" in found.text


def test_a_rank_that_has_ended_holds_up_only_those_that_wait_for_it() -> None:
    groups: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (1, 2)}
    first = state(0, replace(waits(0, 5, "a"), groups=groups))
    over = state(2, None, HangCause.ENDED)
    second = state(1, replace(works(1), groups=groups))
    assert found_in([first, second, over]).ranks == (1,)
    waiting = state(1, replace(waits(1, 5, "b"), groups=groups))
    assert found_in([first, waiting, over]).ranks == (2,)
    empty = replace(works(0, members=2), collectives=(), phase="communication")
    saves = replace(empty, doing="saving or loading a checkpoint")
    assert find_hang([state(0, saves), state(1, None, HangCause.ENDED)], 2) is None


def test_a_live_rank_without_a_record_is_named_after_a_minute() -> None:
    """The files of two ranks appear up to a second apart: the second may explain the hang."""
    ranks = [state(0, message(0, "recv 0<-1")), state(1, None)]
    assert find_hang(ranks, 2) is None
    late = state(0, replace(message(0, "recv 0<-1"), seen=PATIENCE_S))
    for found in (find_hang([late, ranks[1]], 2), find_hang(ranks, 2, ended=True)):
        assert found is not None
        assert (found.cause, found.ranks, found.phase) == (HangCause.NOT_ENTERED, (1,), None)
        assert "something other than a step" in found.text


def test_no_hang_without_records_and_while_one_compiles() -> None:
    ranks = [state(0, waits(0, members=2)), state(1, works(1, members=2))]
    assert found_in(ranks).rank == 1
    assert find_hang([state(0, None), state(1, None)], 2) is None
    compiles = replace(works(1, members=2), doing="compiling")
    assert find_hang([ranks[0], state(1, compiles)], 2) is None


def test_a_rank_whose_collectives_are_unknown_is_not_behind() -> None:
    """Such as one whose dump torch has not written yet: it may wait as well."""
    unknown = replace(works(1, members=2), collectives=(), collectives_reason="not written yet")
    assert find_hang([state(0, waits(0, members=2)), state(1, unknown)], 2) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": "1"},
        {"since": -1.0},
        {"collectives": [{"group": "0", "operation": "all_reduce", "sequence": -1}]},
        {"collectives": [{"group": "0", "operation": "all_reduce"}] * 2001},
        {"frames": [{"file": "a.py", "line": 1, "function": "f"}] * 2001},
        {"groups": {"0": [0] * 2001}},
    ],
)
def test_a_record_that_cannot_be_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    content = json.loads((DATA / "sleep-gloo" / hang_name(1)).read_text())
    path = tmp_path / hang_name(1)
    path.write_text(json.dumps(content))
    assert read_record(tmp_path, 1) is not None
    for text in (json.dumps(content | changed), "", "[]", '{"schema": 2}', "[" * 100_000):
        path.write_text(text)
        assert read_record(tmp_path, 1) is None


def test_no_hang_while_a_rank_without_a_record_is_at_a_later_step() -> None:
    """It makes steps, as the last one does that has batches left within `Join`."""
    shadow = state(1, replace(message(1, "recv 1<-0"), seen=PATIENCE_S))
    assert find_hang([replace(state(0, None), step=4), shadow], 2) is None
    assert find_hang([replace(state(0, None), step=3), shadow], 2) is not None


@pytest.mark.parametrize(("ended_at", "is_known"), [(8.0, True), (10.0, False), (None, False)])
def test_a_rank_that_ended_before_the_hang_explains_it_also_afterwards(
    ended_at: float | None, is_known: bool
) -> None:
    early = replace(state(1, None, HangCause.ENDED), ended_at=ended_at)
    ranks = [state(0, waits(0, members=2), HangCause.GONE), early]
    hang = find_hang(ranks, 2, ended=True)
    assert (hang is not None) is is_known
    if hang is not None:
        assert (hang.cause, hang.ranks, hang.waiting) == (HangCause.ENDED, (1,), (0,))
        assert hang.text.startswith("It had made no step for")


def write(folder: Path, number: int, age_s: float = 0.0, **facts: object) -> None:
    """Write a rank's files as its host does."""
    now = time.time() - age_s
    content = {"created": now - 100, "status": "running", "heartbeat": now, "kind": "watch"}
    content |= {"rank": number, "world_size": 3} | process_identity()
    write_run_json(folder, content | facts, rank_json(number), durable=False)
    os.utime(folder / rank_json(number), (now, now))


def write_hang(folder: Path, number: int, age_s: float) -> None:
    """Let ranks 0 and 2 wait for 1."""
    record = waits(number, 9, members=3) if number != 1 else works(1, 8, members=3)
    path = folder / hang_name(number)
    path.write_text(json.dumps(asdict(record)))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def job(folder: Path, age_s: float = 0.0) -> Hang | None:
    for number in range(3):
        write(folder, number)
        write_hang(folder, number, age_s)
    return hang_of(read_run(folder))


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert found is not None
    assert (found.cause, found.ranks, found.waiting) == (HangCause.NOT_ENTERED, (1,), (0, 2))
    write(tmp_path, 2, status="paused")
    assert hang_of(read_run(tmp_path)) is None
    assert job(tmp_path, FRESH_S + 1) is None, "a record that is left over"
    write(tmp_path, 0, status="failed")
    assert hang_of(read_run(tmp_path)) is not None, "the last one of a job that has ended"


@pytest.mark.parametrize(
    ("host", "cause"),
    # The process on this host is alive, as one that a signal has stopped.
    [({"host": "node2"}, HangCause.GONE), ({}, HangCause.SILENT)],
)
def test_a_rank_whose_heartbeat_has_stopped(
    tmp_path: Path, host: dict[str, str], cause: HangCause
) -> None:
    job(tmp_path)
    write(tmp_path, 2, 2 * STALE_S, **host)
    (tmp_path / hang_name(2)).unlink()
    found = hang_of(read_run(tmp_path))
    assert found is not None
    assert (found.cause, found.ranks) == (cause, (2,))
