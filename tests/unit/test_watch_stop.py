"""Stop on the page of a script: Ctrl-C at a boundary, then harder, each announced first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from stepscope.distributed.rendezvous import find_place
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.run.status import outcome
from stepscope.session.job_commands import JobCommands
from stepscope.session.script_session import ScriptSession
from stepscope.session.stop import StopSignal, handlers_wait
from stepscope.store.reader import send_command
from stepscope.store.recorder import Command, CommandName, Recorder
from tests.support.fake_recorder import FakeRecorder
from tests.support.run_values import events
from tests.support.waiting import wait_until


class Bench:
    """A stopper whose signals are caught in place of sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorder = FakeRecorder(folder)
        self.sent: list[str] = []
        self.came = threading.Semaphore(0)
        self.stopper = StopSignal(cast("Recorder", self.recorder), grace_s=60.0)
        monkeypatch.setattr(os, "kill", lambda _pid, number: self.note("process", number))
        monkeypatch.setattr(signal, "raise_signal", lambda number: self.note("here", number))

    def note(self, where: str, number: signal.Signals) -> None:
        assert self.recorder.events, "a signal was sent unannounced"
        assert number is signal.SIGINT
        self.sent.append(where)
        self.came.release()

    def ask(self, number: int) -> Command:
        command = Command(number, CommandName.STOP, {})
        self.stopper.on_command(command)
        return command


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_without_a_boundary_the_grace_period_or_a_second_stop_sends_the_signal(
    bench: Bench,
) -> None:
    bench.ask(1)
    assert not bench.came.acquire(timeout=0.2)
    assert not bench.stopper.asked
    bench.ask(2)
    assert bench.came.acquire(timeout=10)
    bench.ask(3)
    assert bench.came.acquire(timeout=10)
    assert bench.sent == ["process"] * 2
    assert bench.stopper.asked
    bench.stopper = StopSignal(cast("Recorder", bench.recorder), grace_s=0.0)
    bench.ask(4)
    assert bench.came.acquire(timeout=10)
    bench.stopper.close()
    bench.ask(5)
    assert not bench.came.acquire(timeout=0.2)


def test_a_boundary_is_first_and_the_timer_then_does_nothing(bench: Bench) -> None:
    command = bench.ask(1)
    (timer,) = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    bench.stopper.at_boundary(command)
    assert bench.sent == ["here"]
    bench.stopper.at_boundary(command)
    timer.join(10)
    assert not timer.is_alive(), "it does not wait a minute for nothing"
    timer.function()  # as if its time had come at the same moment
    assert len(bench.sent) == 1


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ScriptSession]:
    run = ScriptSession(
        find_place(tmp_path, "test", {}), name="test", kind=RunKind.WATCH, sample=False
    )
    yield run
    run.close(RunStatus.FINISHED)


def test_a_stop_raises_in_the_training_thread(live: ScriptSession) -> None:
    live.train_on(None)
    for name in ("pause", "stop", "mark"):
        send_command(live.recorder.folder, name, {"text": "behind the stop"})
    wait_until(lambda: len(live.recorder.commands.waiting) == 3)
    with pytest.raises(KeyboardInterrupt):
        live.boundary()
    assert live.boundary() > 0  # the script caught it: what stood behind is served now
    assert live.boundary() == 0.0
    live.close(RunStatus.FAILED, "the script's own way to end")
    found = read_run(live.recorder.folder)
    assert (found.status, found.reason) == (RunStatus.STOPPED, "Stopped from the page.")
    assert [event.kind for event in events(live.recorder.folder)] == ["pause", "stop", "mark"]
    unsupported = {CommandName.MEMORY_SNAPSHOT, CommandName.SAVE_CHECKPOINT}
    assert not unsupported & set(found.run_json["commands"])


def test_commands_are_shared_once_all_ranks_of_the_job_are_on_this_host(
    live: ScriptSession,
) -> None:
    live.join_job(2, 3)
    assert live.world_size == 3
    assert not isinstance(live.recorder.commands, JobCommands)
    live.join_job(3, 3)
    assert isinstance(live.recorder.commands, JobCommands)


def test_a_failure_keeps_its_traceback_also_without_a_memory_reading(
    live: ScriptSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> dict[str, float]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(live._commands, "read_memory", lost)
    error = ValueError("\x1b[31mé\x1b[0m")
    live.failed(outcome(error), error)
    live.close(RunStatus.FAILED, "ValueError: é")
    assert (live.recorder.folder / "traceback.txt").read_text() == "ValueError: é\n"
    event, alert = events(live.recorder.folder)
    assert (event.kind, event.data["after"]) == ("error", {})
    assert alert.data["rule"] == "run_failed"


class Handled(Exception):
    """Raised by the handler of the test, as the DataLoader's does for a killed worker."""


@pytest.fixture
def handler() -> Iterator[object]:
    def handle(*_: object) -> None:
        raise Handled

    former = signal.signal(signal.SIGUSR1, handle)
    yield handle
    signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize(
    ("number", "error", "written"),
    [(signal.SIGUSR1, Handled, ["all"]), (signal.SIGINT, KeyboardInterrupt, [])],
)
def test_a_handler_raises_after_the_block_but_ctrl_c_does_not_wait(
    handler: object, number: signal.Signals, error: type[BaseException], written: list[str]
) -> None:
    lines = []

    @handlers_wait()
    def write() -> None:
        signal.raise_signal(number)
        lines.append("all")

    with pytest.raises(error):
        write()
    assert lines == written
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_the_handlers_are_back_where_the_block_fails_and_in_threads(handler: object) -> None:
    with pytest.raises(ZeroDivisionError), handlers_wait():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) is handler
    seen = []

    def work() -> None:
        with handlers_wait():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler], "another thread leaves them alone"
