"""The thread that looks at this machine: one for all tabs, only while a page looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dashboard.machine import machine_poller
from dashboard.machine.machine_poller import MachinePoller
from stepscope.gpu.source import NullSource
from tests.support.fake_machine import FakeErrors, FakeSource, gpus, info, machine
from tests.support.fake_nvml import FakeClock
from tests.support.waiting import wait_until

NAME = "stepscope-machine"
Make = Callable[..., MachinePoller]


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make watches that look 50 times a second; they end with the test."""
    FakeErrors.begun = []
    made: list[MachinePoller] = []

    monkeypatch.setattr(machine_poller, "XidWatcher", FakeErrors)

    def make(
        source: object, period_s: float = 0.02, idle_s: float = 60.0, **options: Any
    ) -> MachinePoller:
        monkeypatch.setattr(machine_poller, "PERIOD_S", period_s)
        monkeypatch.setattr(machine_poller, "IDLE_S", idle_s)
        made.append(MachinePoller(machine(source), **options))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_many_tabs_share_one_thread_and_its_looks(watching: Make) -> None:
    source = FakeSource(gpus(1))
    watch = watching(source, period_s=3600.0)
    assert threads() == source.reads == [], "nothing runs where nobody looks"
    tabs = [threading.Thread(target=watch.read) for _ in range(16)]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    assert len(threads()) == 1
    assert len(source.reads) == 4, "one poll: each tier once"


def test_it_ends_when_nobody_has_asked_for_a_while_and_begins_anew(watching: Make) -> None:
    source = FakeSource(gpus(1))
    watch = watching(source, idle_s=0.1)
    watch.read()
    wait_until(lambda: threads() == [])
    assert [errors.stopped for errors in FakeErrors.begun] == [True]
    source.gpus[0].values["gpu/util"] = 5.0
    view = watch.read().view
    assert view is not None
    assert view.devices[0].values["gpu/util"] == 5.0, "a fresh look, not what was seen before"


def test_errors_of_the_driver_are_watched_where_there_are_gpus(watching: Make) -> None:
    watch = watching(FakeSource(gpus(1)))
    wait_until(lambda: bool(watch.read().view.devices[0].xids))  # type: ignore[union-attr]
    assert len(FakeErrors.begun) == 1
    past = watch.past()
    assert len(past) >= 2, "it looks by itself"
    assert past[0].ts == FakeClock().wall()
    assert past[0].gpus[info().uuid]["gpu/util"] == 97.0
    watching(NullSource("The NVIDIA driver is not loaded.")).read()
    assert len(FakeErrors.begun) == 1


def test_a_driver_that_does_not_answer_or_falls_silent_holds_nobody_up(watching: Make) -> None:
    source, release, late = FakeSource(gpus(1)), threading.Event(), [0.0]
    source.before_read = lambda: release.wait(60) and None
    clock: Any = lambda: time.monotonic() + late[0]  # noqa: E731
    watch = watching(source, clock=clock, idle_s=3600.0)
    seen = watch.read(wait_s=0.05)
    assert seen.view is None
    assert seen.trouble is not None
    release.set()
    wait_until(lambda: watch.read().view is not None)
    assert watch.read().trouble is None
    called = threading.Event()
    release.clear()
    source.before_read = lambda: called.set() or (release.wait(20) and None)
    assert called.wait(20)
    late[0] = 30.0
    seen = watch.read()
    release.set()
    assert seen.view is not None, "what was seen last"
    assert "30 s" in str(seen.trouble)


def test_a_look_that_fails_is_told_and_the_next_may_succeed(watching: Make) -> None:
    source = FakeSource(gpus(1))

    def fail() -> None:
        raise RuntimeError("broken")

    source.before_read = fail
    watch = watching(source)
    assert "RuntimeError: broken" in str(watch.read().trouble)
    source.before_read = lambda: None
    wait_until(lambda: watch.read().trouble is None)
    watch.close()
    watch.read()
    assert threads() == [], "after the end nothing begins again"
