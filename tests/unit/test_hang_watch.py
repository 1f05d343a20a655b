"""The watch of one rank: when it writes, what it keeps of torch's record; nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dashboard.run_look import EVERY_S, REST, RunLook
from stepscope.distributed.flight_recorder import Collective, FlightRecorderDump
from stepscope.distributed.hangs import watchdog
from stepscope.distributed.hangs.diagnose import judge
from stepscope.distributed.hangs.job_state import Hang, RankObservation
from stepscope.distributed.hangs.record import (
    DOING,
    KEPT,
    PENDING,
    PHASES,
    HangRecord,
    frames_of,
    hang_name,
    kept,
    newest,
    parse,
    word_of,
)
from stepscope.distributed.hangs.watchdog import LEAST_S, PATIENCE, HangWatchdog, StallTimer, Told
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunInfo, RunStatus
from tests.support.fake_live import FakeClock
from tests.support.waiting import wait_until

JOB = {"world_size": 2, "status": RunStatus.RUNNING, "rank": 0, "host": "node1", "pid": 100}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, name="job")
    made.describe(world_size=2, status=RunStatus.RUNNING)
    yield made
    made.close(RunStatus.FINISHED)


def hung(watch: HangWatchdog, run_json: dict[str, Any] = JOB) -> list[Told]:
    """Let a rank make ten steps a second for ten seconds, and none after; return the events."""
    told = []
    for second in range(20):
        watch._clock.now = float(second)  # type: ignore[attr-defined]
        told += watch.look(run_json, min(100, 10 * second))
    return told


@pytest.fixture
def watch(recorder: Recorder) -> Iterator[HangWatchdog]:
    made = HangWatchdog(recorder, 0, clock=FakeClock(now=0.0))
    yield made
    made.close(RunStatus.FINISHED)


def at(watch: HangWatchdog, now: float, step: int) -> list[Told]:
    """Let the watchdog check at a time at which the rank has counted these steps."""
    watch._clock.now = now  # type: ignore[attr-defined]
    return watch.look(JOB, step)


def no_thread() -> bool:
    return not [one for one in threading.enumerate() if one.name == "stepscope-hang"]


def test_a_hang_has_a_record_until_steps_go_on(recorder: Recorder, watch: HangWatchdog) -> None:
    hung(watch)
    path = recorder.folder / hang_name(0)
    wait_until(path.exists)
    record = parse(path.read_bytes())
    assert (record.step, record.rank, record.usual_s) == (100, 0, 0.1)
    assert record.place is not None
    assert record.place.file == __file__, "where the training thread is"
    at(watch, 20.0, 101)
    assert not path.exists()


@pytest.mark.parametrize(
    "other",
    [{"world_size": 1}, {"status": RunStatus.PAUSED}, {"total_steps": 100}, {}],
    ids=["alone", "in a pause", "after the last step", "while a command is served"],
)
def test_no_record(watch: HangWatchdog, other: dict[str, Any]) -> None:
    watch.busy = lambda: not other and watch._clock() > 10
    hung(watch, JOB | other)
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
    hung(watch)
    assert began.wait(5)
    at(watch, 21.0, 102)  # steps go on
    watch.close(RunStatus.FINISHED)
    lock.set()
    wait_until(no_thread)
    assert not (recorder.folder / hang_name(0)).exists(), "a late record is of no hang any more"


def test_an_error_in_the_capture_is_said_once(
    watch: HangWatchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> HangRecord:
        raise RuntimeError("no such entry")

    monkeypatch.setattr(watchdog, "capture", broken)
    hung(watch)
    wait_until(lambda: "could not be recorded: no such entry" in caplog.text)
    watch.close(RunStatus.FAILED)
    assert caplog.text.count("no such entry") == 1


def entered(*created_s: float) -> Callable[[HangRecord, int], HangRecord]:
    """Return a capture whose newest collective is of these times in turn, and then of the last."""
    times = list(created_s)

    def capture(known: HangRecord, thread: int) -> HangRecord:
        at = times.pop(0) if len(times) > 1 else times[0]
        one = Collective(group="0", operation="all_reduce", sequence=7, created_s=at)
        return replace(known, seen=time.time(), collectives=(one,))

    return capture


def test_no_record_while_collectives_go_on(
    recorder: Recorder, watch: HangWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a validation without a DataLoader, or within `Join`."""
    monkeypatch.setattr(watchdog, "capture", entered(time.time()))
    hung(watch)
    wait_until(no_thread)
    assert not (recorder.folder / hang_name(0)).exists()
    assert at(watch, 20.0, 100) == []
    assert no_thread(), "the wait has begun again"
    at(watch, 30.0, 100)
    wait_until((recorder.folder / hang_name(0)).exists)  # no newer collective since


def both_stuck() -> Hang:
    """Return the hang of two ranks in a collective that both have entered."""
    one = Collective(group="0", operation="all_reduce", sequence=7)
    ranks = [
        HangRecord(number=rank, rank=rank, step=3, since=0.0, seen=9.0, collectives=(one,))
        for rank in range(2)
    ]
    found = judge([RankObservation(rank=one.rank, record=one) for one in ranks], 9.0, 2)
    assert found is not None
    return found


def test_a_hang_is_over_once_collectives_go_on(
    recorder: Recorder, watch: HangWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "hang_of", lambda _run: both_stuck())
    monkeypatch.setattr(watchdog, "SOON_S", 0.0)
    monkeypatch.setattr(watchdog, "REFRESH_S", 0.0)
    monkeypatch.setattr(watchdog, "capture", entered(1.0, time.time()))
    told = hung(watch)
    wait_until(no_thread)
    assert not (recorder.folder / hang_name(0)).exists()
    told += at(watch, 21.0, 100)
    assert [kind for kind, _, _ in told] == ["hang", "hang_over"]
    assert told[1][1].startswith("Collectives go on after ")


def collective(number: int, *, done: bool, group: str = "0") -> Collective:
    return Collective(
        record=number, sequence=number, group=group, operation="all_reduce", done=done
    )


def test_what_is_not_over_is_kept_and_the_newest_of_each_group() -> None:
    told = [collective(number, done=number != 3) for number in range(500)]
    other = [collective(900, done=True, group="1")]
    kept_ones = newest(FlightRecorderDump(collectives=(*other, *told), groups={}))
    assert [one.record for one in kept_ones] == [900, 3, *range(500 - KEPT, 500)]
    waiting = tuple(collective(number, done=False) for number in range(500))
    many = newest(FlightRecorderDump(collectives=waiting, groups={}))
    assert len(many) == PENDING + KEPT


def test_the_stack_of_another_thread_names_the_phase() -> None:
    ready, end = threading.Event(), threading.Event()
    scope: dict[str, Any] = {"ready": ready, "end": end}
    code = compile("def forward():\n ready.set()\n end.wait(10)\n", "/x/model.py", "exec")
    outer = compile("def call(f):\n f()\n", "/x/site-packages/torch/nn/modules/module.py", "exec")
    exec(code, scope)
    exec(outer, scope)
    thread = threading.Thread(target=scope["call"], args=(scope["forward"],))
    thread.start()
    assert ready.wait(5)
    frames = frames_of(thread.ident or 0)
    end.set()
    thread.join()
    assert word_of(frames, PHASES) == "forward"
    assert word_of(frames, DOING) is None
    place = next(frame for frame in kept(frames) if frame.own)
    assert (place.file, place.function) == ("/x/model.py", "forward")
    assert frames_of(thread.ident or 0) == ()


def at_once(look: Callable[[], None]) -> None:
    look()


def test_a_poll_waits_for_no_look(recorder: Recorder) -> None:
    """A look at the files of some hundred ranks takes longer than a poll may."""
    found, clock = both_stuck(), FakeClock(now=0.0)

    def slow(run: RunInfo) -> Hang | None:
        clock.now += 1.0
        return found

    aside: list[Callable[[], None]] = []
    hangs = RunLook(slow, "", clock, aside.append)
    run = RunInfo(recorder.folder, RunStatus.RUNNING, None, 0.0, JOB)
    assert hangs.of(run) is None
    assert hangs.of(run) is None
    [look] = aside
    look()
    clock.now += REST - 1
    assert hangs.of(run) == found
    assert len(aside) == 1, "a look that took a second is not repeated soon"
    clock.now += 1
    hangs.of(run)
    assert len(aside) == 2


def test_a_folder_that_cannot_be_judged_costs_one_line_of_the_log(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: RunInfo) -> str:
        if clock.now < 3 * EVERY_S:
            raise OverflowError("nobody has thought of it")
        return "found"

    clock = FakeClock(now=0.0)
    hangs = RunLook(fail, "it cannot be said", clock, at_once)
    run = RunInfo(recorder.folder, RunStatus.RUNNING, None, 0.0, JOB)
    for second in range(4):
        clock.now = second * EVERY_S
        assert hangs.of(run) == ("found" if second == 3 else None)
    assert caplog.text.count("cannot be said") == 1


def run(pace: StallTimer, seconds: range, step_s: float) -> None:
    for second in seconds:
        assert pace.look(float(second), int(second / step_s), due=True) is None


@pytest.fixture
def pace() -> StallTimer:
    """A run that has made ten steps a second for 9 s."""
    made = StallTimer()
    run(made, range(10), 0.1)
    return made


def test_steps_hang_after_the_least_time_or_ten_times_their_own(pace: StallTimer) -> None:
    waits = [pace.look(float(second), 90, due=True) for second in range(10, 17)]
    assert waits == [None] * 4 + [LEAST_S, 6.0, 7.0]
    pace = StallTimer()
    run(pace, range(41), 4.0)
    assert pace.usual_s == 4.0
    assert [pace.look(40 + wait, 10, due=True) for wait in (39.0, 40.0)] == [None, 40.0]


def test_first_steps_other_work_and_pauses_do_not_count(pace: StallTimer) -> None:
    first = StallTimer()
    assert all(first.look(float(second), 2, due=True) is None for second in range(600))
    works = StallTimer()
    run(works, range(10), 0.1)
    for second in range(10, 60):
        assert works.look(float(second), 90, due=True, sign=second) is None
    for second in range(10, 100):  # a pause
        assert pace.look(float(second), 90, due=False) is None
    assert pace.look(103.0, 90, due=True) is None
    assert pace.look(104.0, 90, due=True) == LEAST_S


def test_a_wait_that_ended_by_itself_is_waited_for_again(pace: StallTimer) -> None:
    """Such as that for a checkpoint every thousand steps."""
    assert pace.look(20.0, 90, due=True) is not None
    assert pace.look(21.0, 91, due=True) is None
    assert pace.longest_s == 12.0
    run(pace, range(22, 30), 0.1)
    last = int(29 / 0.1)
    assert pace.look(29 + PATIENCE * 12 - 1, last, due=True) is None
    assert pace.look(29 + PATIENCE * 12, last, due=True) is not None


def test_collectives_that_go_on_begin_the_wait_anew(pace: StallTimer) -> None:
    assert pace.look(15.0, 90, due=True) is not None
    pace.moved(15.0, 1.0, waited=False)
    assert (pace.since, pace.longest_s) == (14.0, 0.0)
    assert pace.look(18.0, 90, due=True) is None
    assert pace.look(19.0, 90, due=True) == LEAST_S
    pace.moved(19.0, 60.0, waited=False)
    assert pace.since == 14.0, "older than what is known"
    pace.moved(19.0, -60.0, waited=False)
    assert pace.since == 19.0, "the clock was set back"
    pace.moved(25.0, 1.0, waited=True)  # such as for a long batch of a validation
    assert (pace.longest_s, pace.limit_s) == (5.0, PATIENCE * 5.0)
