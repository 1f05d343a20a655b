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
from stepscope.distributed.hangs.causes import PATIENCE_S
from stepscope.distributed.hangs.diagnose import FRESH_S, hang_of, judge
from stepscope.distributed.hangs.job_state import Hang, HangCause, RankLiveness, RankObservation
from stepscope.distributed.hangs.record import HangRecord, StackFrame, hang_name, parse
from stepscope.run import STALE_S, process_identity, rank_json, read_run, write_run_json

DATA = Path(__file__).parents[1] / "data" / "hangs"


def recorded(case: str) -> list[RankObservation]:
    """Return the ranks of a hang as they wrote it."""
    files = (DATA / case / hang_name(number) for number in range(2))
    return [state(number, parse(file.read_bytes())) for number, file in enumerate(files)]


def state(
    rank: int, record: HangRecord | None, condition: RankLiveness = RankLiveness.ALIVE
) -> RankObservation:
    return RankObservation(
        rank=rank, host="node1", pid=100 + rank, condition=condition, beat_age_s=12.0, record=record
    )


def judged(
    ranks: list[RankObservation], world_size: int | None = None, *, ended: bool = False
) -> Hang:
    records = [one.record for one in ranks if one.record is not None]
    now = max(record.seen for record in records)
    found = judge(ranks, now, world_size or len(ranks), ended=ended)
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


SLEEP = (
    "rank 1 has not entered all_reduce #81 (16 B), which rank 0 entered",
    "Rank 1 is at hanging.py:84 in hang.",
)
MISMATCH = ("rank 0 all_reduce (16 B); rank 1 all_gather (400 B)",)
ORDER = ("rank 1 in all_reduce #1 of group 1 (400 B)",)
RECEIVE = ("rank 0 waits in recv 0<-1; rank 1 waits in recv 1<-0",)
RECEIVE_STACKS = ("all ranks wait for each other: rank 0 at hanging.py:92 in hang; rank 1",)


@pytest.mark.parametrize(
    ("case", "cause", "ranks", "phase", "sequence", "texts"),
    [
        ("sleep-gloo", HangCause.NOT_ENTERED, (1,), None, 81, SLEEP),
        ("sleep-nccl", HangCause.NOT_ENTERED, (1,), None, 81, SLEEP),
        ("input-gloo", HangCause.NOT_ENTERED, (1,), "input", 81, ("in __getitem__ (input)",)),
        ("mismatch-gloo", HangCause.MISMATCH, (1,), "communication", 81, MISMATCH),
        ("mismatch-nccl", HangCause.MISMATCH, (1,), "communication", 81, MISMATCH),
        ("order-gloo", HangCause.ORDER, (0, 1), "communication", 81, ORDER),
        ("receive-nccl", HangCause.MISMATCH, (0, 1), "communication", None, RECEIVE),
        # gloo records no point-to-point operations.
        ("receive-gloo", HangCause.STACK, (0, 1), "communication", None, RECEIVE_STACKS),
    ],
)
def test_recorded_hangs(
    case: str,
    cause: HangCause,
    ranks: tuple[int, ...],
    phase: str | None,
    sequence: int | None,
    texts: tuple[str, ...],
) -> None:
    found = judged(recorded(case))
    assert (found.cause, found.ranks, found.phase, found.sequence) == (
        cause,
        ranks,
        phase,
        sequence,
    )
    assert all(text in found.text for text in texts)


def test_different_sizes_under_one_number() -> None:
    ranks = [state(rank, waits(rank)) for rank in range(4)]
    small = replace(waits(2).collectives[0], input_bytes=40)
    ranks[2] = state(2, replace(waits(2), collectives=(small,)))
    found = judged(ranks)
    assert (found.cause, found.ranks) == (HangCause.MISMATCH, (2,))
    assert "ranks 0, 1, 3 all_reduce (4.00 KiB); rank 2 all_reduce (40 B)" in found.text
    for rank, size in enumerate((40, 80)):  # this operation allows it
        one = Collective(group="0", operation="all_to_all", sequence=7, input_bytes=size)
        ranks[rank] = state(rank, replace(waits(rank, members=2), collectives=(one,)))
    assert judged(ranks[:2]).cause is HangCause.ALL_ENTERED


def test_the_end_of_a_chain_of_groups_is_named() -> None:
    """Rank 0 waits for 1 in one group, 1 for 2 in another; 2 reads data."""
    first = replace(waits(0, 5, "a"), groups={"a": (0, 1), "b": (1, 2)})
    second = replace(waits(1, 9, "b"), groups=first.groups)
    third = replace(works(2), groups=first.groups)
    found = judged([state(0, first), state(1, second), state(2, third)])
    assert (found.cause, found.ranks, found.group) == (HangCause.NOT_ENTERED, (2,), "b")


def test_a_message_to_a_rank_that_does_something_else() -> None:
    one = Collective(group="0", operation="recv 0<-1", sequence=None, input_bytes=400)
    first = replace(waits(0, members=2), collectives=(one,))
    found = judged([state(0, first), state(1, works(1, members=2))])
    assert (found.rank, found.phase) == (1, "input")
    assert "rank 0 waits in recv 0<-1. Rank 1 is at train.py:30 in load (input)" in found.text


def test_a_message_names_nobody_until_the_other_rank_has_a_record() -> None:
    """The files of two ranks appear up to a second apart: the second tells what the hang is."""
    first, second = recorded("receive-nccl")
    assert first.record is not None
    assert judge([first, replace(second, record=None)], first.record.seen, 2) is None
    found = judged([replace(first, record=None), second], ended=True)
    assert (found.ranks, found.phase) == ((0,), None)


def test_the_rank_that_a_message_comes_from_is_counted_in_its_group() -> None:
    one = Collective(group="b", operation="recv 0<-1", sequence=None, input_bytes=400)
    groups = {"0": (0, 1, 2, 3), "b": (1, 3)}
    ranks = [state(rank, replace(works(rank), groups=groups)) for rank in range(4)]
    ranks[1] = state(1, replace(waits(1), collectives=(one,), groups=groups))
    assert (judged(ranks).ranks, judged(ranks).waiting) == ((3,), (1,))


def test_one_of_several_is_elsewhere_by_its_stack() -> None:
    alone = [replace(one, record=replace(one.record, collectives=())) if one.record else one
             for one in recorded("sleep-gloo")]  # fmt: skip
    first = alone[0].record
    assert first is not None
    alone[0] = replace(alone[0], record=replace(first, phase="communication"))
    found = judged(alone)
    assert (found.cause, found.ranks, found.waiting) == (HangCause.STACK, (1,), (0,))


@pytest.mark.parametrize(
    ("condition", "cause", "words", "next_words"),
    [
        (RankLiveness.GONE, HangCause.GONE, "rank 2 is gone without an exit record", "dmesg"),
        (
            RankLiveness.STOPPED,
            HangCause.STOPPED,
            "rank 2 is stopped by a signal",
            "kill -CONT 102",
        ),
        (RankLiveness.SILENT, HangCause.SILENT, "not responded for 12 s:", "py-spy dump --pid 102"),
        (RankLiveness.ENDED, HangCause.ENDED, "rank 2 has ended", "same number of steps"),
        (RankLiveness.ABSENT, HangCause.ABSENT, "rank 2 has never started", "launcher"),
    ],
)
def test_a_process_that_explains_it(
    condition: RankLiveness, cause: HangCause, words: str, next_words: str
) -> None:
    ranks = [state(rank, waits(rank)) for rank in (0, 1, 3)]
    found = judged([*ranks, state(2, None, condition)], 4)
    assert (found.cause, found.ranks, found.waiting) == (cause, (2,), (0, 1, 3))
    assert words in found.text
    assert "ranks 0, 1, 3 wait in all_reduce #7 (4.00 KiB)" in found.text
    assert next_words in found.next


def test_a_rank_that_has_ended_holds_up_only_those_of_its_groups() -> None:
    groups: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (1, 2)}
    first = replace(waits(0, 5, "a"), groups=groups)
    second = replace(works(1), groups=groups)
    over = state(2, None, RankLiveness.ENDED)
    assert judged([state(0, first), state(1, second), over], 3).ranks == (1,)
    waiting = replace(waits(1, 5, "b"), groups=groups)
    assert judged([state(0, first), state(1, waiting), over], 3).ranks == (2,)


def test_without_collectives_the_stack_shows_who_waits_for_an_ended_rank() -> None:
    empty = replace(works(0, members=2), collectives=(), phase="communication")
    found = judged([state(0, empty), state(1, None, RankLiveness.ENDED)])
    assert (found.cause, found.ranks) == (HangCause.ENDED, (1,))
    saves = replace(empty, doing="saving or loading a checkpoint")
    for works_on in (saves, works(0, members=2)):  # such as a report after the last step
        assert judge([state(0, works_on), state(1, None, RankLiveness.ENDED)], 9.0, 2) is None


def test_nothing_is_said_of_a_rank_without_a_record() -> None:
    ranks = [*(state(rank, waits(rank)) for rank in range(3)), state(3, None)]
    assert judge(ranks, 9.0, 4) is None
    late = [replace(one, record=replace(one.record, since=-90.0)) if one.record else one
            for one in ranks]  # fmt: skip
    found = judge(late, 9.0, 4)
    assert found is not None
    assert (found.ranks, found.phase) == ((3,), None)
    assert "busy with something other than a step" in found.text


def test_no_hang_while_a_rank_without_a_record_is_at_a_later_step() -> None:
    """It makes steps, as the last one does that has batches left within `Join`."""
    message = Collective(group="0", operation="recv 1<-0", sequence=None, input_bytes=400)
    shadow = state(1, replace(waits(1, members=2), collectives=(message,)))
    at_work = replace(state(0, None), step=4)
    assert judge([at_work, shadow], 9.0, 2) is None
    found = judge([replace(at_work, step=3), shadow], 9.0 + PATIENCE_S, 2)
    assert found is not None
    assert (found.cause, found.ranks, found.phase) == (HangCause.NOT_ENTERED, (0,), None)
    for condition in (RankLiveness.GONE, RankLiveness.STOPPED):
        assert judge([replace(at_work, condition=condition), shadow], 9.0, 2) is not None


def test_no_hang_without_records_in_a_pause_and_while_one_compiles() -> None:
    ranks = [state(0, waits(0, members=2)), state(1, works(1, members=2))]
    assert judge([state(0, None), state(1, None)], 9.0, 2) is None
    assert judge([ranks[0], replace(ranks[1], paused=True)], 9.0, 2) is None
    compiles = replace(works(1, members=2), doing="compiling")
    assert judge([ranks[0], state(1, compiles)], 9.0, 2) is None


def test_how_an_ended_job_hung() -> None:
    ranks = [replace(one, condition=RankLiveness.GONE) for one in recorded("sleep-nccl")]
    found = judged(ranks, ended=True)
    assert (found.cause, found.ranks) == (HangCause.NOT_ENTERED, (1,))
    assert found.text.startswith("It had made no step for ")
    assert "rank 1 had not entered all_reduce #81 (16 B), which rank 0 entered" in found.text
    assert "Rank 1 was at hanging.py:84 in hang." in found.text
    assert found.next == "Check what rank 1 did there."
    killed = [state(0, waits(0, members=2), RankLiveness.GONE), state(1, None, RankLiveness.GONE)]
    assert judged(killed, ended=True).ranks == (1,)


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": "1"},
        {"collectives": [3]},
        {"since": None},
        {"since": -1.0},
        {"since": -1e308, "seen": 1e308},
        {"since": 1e308, "seen": 1e308},
        {"seen": 1.0},
        {"seen": 2**62},
        {"collectives": [{"group": "0", "operation": "all_reduce", "sequence": -1}]},
        {"collectives": [{"group": "0", "operation": "all_reduce", "input_bytes": -1}]},
        {"step": 10**400},
        {"host": "x" * 5000},
        {"collectives": [{"group": "0", "operation": "all_reduce", "created_s": -1.0}]},
        {"collectives": [{"group": "0", "operation": "all_reduce", "created_s": 1e308}]},
        {"collectives": [{"group": "0", "operation": "all_reduce", "created_s": 9e9}]},
        {"collectives": [{"group": "0", "operation": "all_reduce"}] * 2001},
        {"frames": [{"file": "a.py", "line": 1, "function": "f"}] * 2001},
        {"groups": {str(number): [0] for number in range(2001)}},
        {"groups": {"0": [0] * 2001}},
        {"groups": {"x" * 5000: [0]}},
        {"groups": {"0": [-1]}},
    ],
)
def test_a_record_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    told = json.loads((DATA / "sleep-gloo" / hang_name(1)).read_text())
    assert parse(json.dumps(told)).rank == 1
    with pytest.raises(ValueError, match="record"):
        parse(json.dumps(told | changed))
    for text in ("", "[]", '{"schema": 2}', "[" * 100_000):
        with pytest.raises(ValueError, match="must be"):
            parse(text)


def test_an_entry_of_unknown_time_has_no_age_and_a_record_comes_back_as_written() -> None:
    ranks = [state(0, waits(0, members=2)), state(1, works(1, members=2))]
    assert "which rank 0 entered. Rank 1 is" in judged(ranks).text
    known = replace(waits(0).collectives[0], created_s=4.0)
    ranks[0] = state(0, replace(waits(0, members=2), collectives=(known,)))
    assert "which rank 0 entered 5 s ago. Rank 1 is" in judged(ranks).text
    record = works(1)
    assert parse(json.dumps(asdict(record))) == record


def write(folder: Path, number: int, now: float, **facts: object) -> None:
    """Write a rank's files as its host does."""
    told = {"created": now - 100, "status": "running", "heartbeat": now, "kind": "watch"}
    told |= {"rank": number, "world_size": 3} | process_identity()
    write_run_json(folder, told | facts, rank_json(number), durable=False)
    os.utime(folder / rank_json(number), (now, now))


def hangs(folder: Path, number: int, now: float, *, waits: bool) -> None:
    """Write the record of a rank that has waited for 8 s in all_reduce 9, or has left 8."""
    sequence, created_s = (9, now - 8) if waits else (8, now - 10)
    last = Collective(
        group="0", operation="all_reduce", sequence=sequence, created_s=created_s, done=not waits
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
    # A host whose clock was set: its own times stay as they began, and its heartbeat is right.
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
