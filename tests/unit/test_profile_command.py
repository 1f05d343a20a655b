"""PROFILE from the press to the answer and the files."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stepscope.profiling import phase_ranges, profile_command, torch_profiler
from stepscope.profiling.summary import parse
from stepscope.profiling.torch_profiler import ProfilerCapture
from stepscope.session.command_server import CommandServer
from stepscope.session.sampler import Sampler
from stepscope.store.recorder import Command, CommandName, Recorder
from tests.support.fake_recorder import FakeRecorder, command

Event = tuple[str, str, dict[str, Any]]


class Bench:
    """A training of one addition a step."""

    def __init__(self, folder: Path) -> None:
        self.recorder = FakeRecorder(folder)
        recorder = cast("Recorder", self.recorder)
        sampler = Sampler(recorder, allocator_index=None)
        self.server = CommandServer(recorder, sampler, {}, closed_here=True)

    def ask(self, **args: Any) -> None:
        self.serve(command(CommandName.PROFILE, **args))

    def serve(self, *asked: Command) -> float:
        self.recorder.asked = list(asked)
        return self.server.serve(lambda: None)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with phase_ranges.span(phase_ranges.FORWARD):
                torch.ones(3) + 1
            self.recorder.step += 1
            self.serve()

    def begin(self, more: int) -> None:
        """Ask for 50 steps, and train until so many are recorded."""
        self.ask(steps=50)
        self.train(1 + more)

    @property
    def answers(self) -> list[Event]:
        return [event for event in self.recorder.events if event[0] == "profile"]

    def ended(self, ok: bool, text: str, *steps: int) -> None:
        """Check the only answer, and the first and last step of the profile."""
        [(_, answer, data)] = self.answers
        assert data["ok"] is ok
        assert answer.count(text) == 1, answer
        assert not steps or (data["first"], data["last"]) == steps


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[no-untyped-call]


def test_so_many_steps_are_profiled(bench: Bench) -> None:
    bench.train(10)
    bench.ask(steps=3)
    assert bench.server.profiling.active
    for _ in range(20):
        bench.serve()  # validation has boundaries without a step
    assert not profiled()
    bench.train(1)
    assert profiled()
    for _ in range(20):
        bench.serve()
    assert bench.answers == []
    bench.train(4)
    assert not profiled()
    assert not bench.server.profiling.active
    [(_, _, data)] = bench.answers
    assert (data["ok"], data["first"], data["last"]) == (True, 12, 14)
    trace, summary = (bench.recorder.folder / data[name] for name in ("path", "summary"))
    assert b"traceEvents" in gzip.decompress(trace.read_bytes())
    calls = {operator.name: operator.calls for operator in parse(summary.read_bytes()).operators}
    assert (calls["forward"], calls["aten::add"]) == (3, 3)
    assert {*bench.recorder.folder.glob("*profile*")} == {trace, summary}


@pytest.mark.parametrize("steps", [0, 51, True])
def test_a_wrong_number_of_steps_is_refused(bench: Bench, steps: Any) -> None:
    bench.ask(steps=steps)
    bench.ended(False, "Profile: steps must be a whole number from 1 to 50, got ")


def test_a_second_profiler_is_refused(bench: Bench) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as own:
        bench.ask()
        bench.train(10)
    assert own.key_averages()
    bench.ended(False, "another torch profiler is active")
    bench.ask()
    bench.ask()
    assert bench.answers[1][1:] == ("Profile: one is being taken already", {"ok": False})


def test_a_profiler_that_the_script_starts_later_ends_ours(bench: Bench) -> None:
    starter = torch.autograd.profiler._enable_profiler
    bench.begin(2)
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(4) * 3
        bench.train(2)
    assert [row.count for row in own.key_averages() if row.key == "aten::mul"] == [1]
    bench.ended(True, "it ended early: the script started a profiler of its own", 2, 4)
    assert torch.autograd.profiler._enable_profiler is starter


def fork(bench: Bench) -> None:
    child = os.fork()
    if child == 0:
        os._exit(int(profiled()))
    assert os.waitpid(child, 0)[1] == 0


def pause(bench: Bench) -> None:
    bench.recorder.while_paused = [command(CommandName.RESUME)]
    bench.serve(command(CommandName.PAUSE))


def close(bench: Bench) -> None:
    for _ in range(2):
        bench.server.close()
    assert not profiled()


@pytest.mark.parametrize(
    ("interrupt", "reason", "last"),
    [(fork, "process forked", 4), (pause, "run was paused", 3), (close, "run ended", 3)],
)
def test_what_cannot_be_profiled_on_ends_it_early(
    bench: Bench, interrupt: Callable[[Bench], None], reason: str, last: int
) -> None:
    bench.begin(2)
    assert profiled()
    interrupt(bench)
    bench.train(1)
    bench.ended(True, f"it ended early: the {reason}", 2, last)


def test_slow_steps_are_not_waited_for_and_another_thread_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_command, "PROFILE_S", 0.0)
    bench.ask()
    bench.train(3)
    bench.ended(True, "it ended early: a profile ends after 0 s", 2, 2)
    bench.server.profiling.ended_here = False
    thread = threading.Thread(target=bench.ask)
    thread.start()
    thread.join()
    assert "trains in another thread" in bench.answers[1][1]


def test_a_trace_that_cannot_be_written_leaves_no_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch_profiler.shutil, "copyfileobj", fill_the_disk)
    bench.ask(steps=1)
    bench.train(1 + 3)
    bench.ended(False, "No space left on device")
    assert not list(bench.recorder.folder.glob("*profile*"))


@pytest.mark.parametrize("broken", ["start", "export_chrome_trace"])
def test_a_profiler_that_fails_is_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUPTI error")

    with monkeypatch.context() as patch:
        patch.setattr(profile, broken, fail)
        bench.ask(steps=2)
        bench.train(1 + 5)
    bench.ended(False, "Profile: failed (RuntimeError: CUPTI error)")
    if profiled():
        torch._C._autograd._disable_profiler()
        torch.autograd.profiler._is_profiler_enabled = False


def test_a_profiler_of_another_thread_waits_for_ours_to_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, another = threading.Event(), ProfilerCapture._another

    def announced(capture: ProfilerCapture) -> None:
        begins.set()
        another(capture)

    monkeypatch.setattr(ProfilerCapture, "_another", announced)

    own = profile(activities=[ProfilerActivity.CPU])

    def other() -> None:
        with own:
            torch.ones(4) * 3

    bench.begin(1)
    thread = threading.Thread(target=other)
    thread.start()
    assert begins.wait(20)
    while not bench.answers:
        bench.train(1)
    thread.join(20)
    assert [row.count for row in own.key_averages() if row.key == "aten::mul"] == [1]
