"""The watch of one rank: when it writes, what it keeps of torch's record; nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.common.stall_detector import StallDetector, StepGap
from stepscope.distributed import flight_recorder
from stepscope.distributed.flight_recorder import Collective
from stepscope.distributed.hangs import watchdog
from stepscope.distributed.hangs.cases import Hang, RankObservation, find_hang
from stepscope.distributed.hangs.record import HangRecord, hang_name, read_record
from stepscope.distributed.hangs.watchdog import MIN_HANG_S, EventParts, HangWatchdog
from stepscope.run import RunStatus
from stepscope.store.recorder import Recorder
from tests.support.waiting import wait_until

JOB = {"world_size": 2, "status": RunStatus.RUNNING, "rank": 0, "host": "node1", "pid": 100}
STALL = StepGap(MIN_HANG_S, 0.1, 0.0)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, name="job")
    made.describe(world_size=2, status=RunStatus.RUNNING)
    yield made
    made.close(RunStatus.FINISHED)


@pytest.fixture
def stalls() -> StallDetector:
    return StallDetector()


@pytest.fixture
def watch(recorder: Recorder, stalls: StallDetector) -> Iterator[HangWatchdog]:
    made = HangWatchdog(recorder, 0, stalls)
    yield made
    made.close(RunStatus.FINISHED)


def no_thread() -> bool:
    return not [one for one in threading.enumerate() if one.name == "stepscope-hang"]


def test_a_hang_has_a_record_until_steps_go_on(
    recorder: Recorder, watch: HangWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the collectives of other tests in this process.
    monkeypatch.setattr(flight_recorder, "dump", lambda: None)
    watch.check(JOB, 100, STALL)
    wait_until((recorder.folder / hang_name(0)).exists)
    record = read_record(recorder.folder, 0)
    assert record is not None
    assert (record.step, record.rank) == (100, 0)
    assert record.seen - record.since >= MIN_HANG_S
    assert record.place is not None
    assert Path(__file__).name in record.place, "where the training thread is"
    watch.check(JOB, 101, StepGap(0.0, 0.1, MIN_HANG_S))
    assert not (recorder.folder / hang_name(0)).exists()


@pytest.mark.parametrize(
    ("run_json", "gap"),
    [(JOB | {"world_size": 1}, STALL), (JOB, None), (JOB, replace(STALL, seconds=4.9))],
)
def test_no_record(watch: HangWatchdog, run_json: dict[str, Any], gap: StepGap | None) -> None:
    watch.check(run_json, 100, gap)
    assert no_thread()


def test_a_dump_that_never_returns_holds_up_nobody(
    recorder: Recorder, watch: HangWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that waits for a lock of torch or of the driver."""
    began, lock = threading.Event(), threading.Event()

    def stuck(first: HangRecord, thread: int) -> HangRecord:
        began.set()
        lock.wait(30)
        return first

    monkeypatch.setattr(watchdog, "capture", stuck)
    watch.check(JOB, 100, STALL)
    assert began.wait(5)
    watch.check(JOB, 102, None)  # steps go on
    watch.close(RunStatus.FINISHED)
    lock.set()
    wait_until(no_thread)
    assert not (recorder.folder / hang_name(0)).exists(), "a late record is of no hang any more"


def entered(*created_s: float) -> Callable[[HangRecord, int], HangRecord]:
    """Return a capture whose newest collective is of these times in turn, and then of the last."""
    times = list(created_s)

    def capture(known: HangRecord, thread: int) -> HangRecord:
        at = times.pop(0) if len(times) > 1 else times[0]
        one = Collective(group="0", operation="all_reduce", sequence=7, created_s=at)
        return replace(known, seen=time.time(), collectives=(one,))

    return capture


def test_no_record_while_collectives_go_on(
    recorder: Recorder,
    watch: HangWatchdog,
    stalls: StallDetector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a validation without a DataLoader, or within `Join`."""
    for second in range(10):
        stalls.update(float(second), 10 * second, due=True, work=0)
    monkeypatch.setattr(watchdog, "capture", entered(time.time()))
    watch.check(JOB, 90, STALL)
    wait_until(no_thread)
    assert not (recorder.folder / hang_name(0)).exists()
    gap = stalls.update(20.0, 90, due=True, work=0)
    assert gap is not None
    assert gap.seconds == 0.0
    assert watch.check(JOB, 90, gap) == []
    monkeypatch.setattr(watchdog, "capture", entered(time.time() - 60))
    watch.check(JOB, 90, STALL)
    wait_until((recorder.folder / hang_name(0)).exists)  # no newer collective since


def both_stuck() -> Hang:
    """Return the hang of two ranks in a collective that both have entered."""
    one = Collective(group="0", operation="all_reduce", sequence=7)
    ranks = [
        HangRecord(number=rank, rank=rank, step=3, since=0.0, seen=9.0, collectives=(one,))
        for rank in range(2)
    ]
    ranks = [replace(one, groups={"0": (0, 1)}) for one in ranks]
    found = find_hang([RankObservation(rank=one.rank, record=one) for one in ranks], 2)
    assert found is not None
    return found


def test_a_hang_is_over_once_collectives_go_on(
    recorder: Recorder, watch: HangWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "hang_of", lambda _run: both_stuck())
    monkeypatch.setattr(watchdog, "FIRST_DIAGNOSIS_S", 0.0)
    monkeypatch.setattr(watchdog, "REFRESH_S", 0.0)
    monkeypatch.setattr(watchdog, "capture", entered(1.0, time.time()))
    events: list[EventParts] = watch.check(JOB, 100, STALL)
    wait_until(no_thread)
    assert not (recorder.folder / hang_name(0)).exists()
    assert watch.hang == both_stuck()
    events += watch.check(JOB, 100, None)
    assert [kind for kind, _, _ in events] == ["hang", "hang_over"]
    assert watch.hang is None
