"""A lesson's child process, whatever the program does; and every lesson on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard import services
from stepscope.host.child_process import ChildOutput, ChildState
from stepscope.run import RunError
from tests.support.child_process import ROOT, is_running
from tests.support.lesson_programs import (
    EXPECTED,
    SLEEP,
    Write,
    run,
    write,
)
from tests.support.waiting import wait_until
from trainer.lessons import LESSONS, Lesson
from trainer.runners.child_process import LessonRun

__all__ = ["write"]


def until(run: LessonRun, true: Callable[[ChildOutput], bool]) -> ChildOutput:
    wait_until(lambda: true(run.output()), 20)
    return run.output()


def ended(run: LessonRun) -> ChildOutput:
    return until(run, lambda output: output.state is not ChildState.RUNNING)


def wait_for_end(pid: int) -> None:
    """Wait until a killed process is gone."""
    wait_until(lambda: not is_running(pid), 5)


def test_output_comes_while_it_runs_and_stays(write: Write, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    program = f"""
import pathlib, sys, time
print("first")
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.01)
print("second", file=sys.stderr)
"""
    run = LessonRun(write(program))
    assert until(run, lambda output: "first" in output.text).state is ChildState.RUNNING
    go_on.touch()
    output = ended(run)
    assert (output.state, output.text) == (ChildState.FINISHED, "first\nsecond\n")
    assert output.seconds == run.output().seconds > 0  # the clock has stopped


def test_time_is_limited_and_bytes_are_shown(write: Write) -> None:
    late = ended(LessonRun(write(SLEEP, limit_s=1.0)))
    assert late.state is ChildState.FAILED
    assert "1 s" in str(late.reason)
    assert late.seconds < 60
    program = "import sys\nsys.stdout.buffer.write(b'\\xff\\x00 <b>')\n"
    assert ended(LessonRun(write(program))).text == "\N{REPLACEMENT CHARACTER}\0 <b>"


def test_stop_ends_it_with_all_that_it_started(write: Write) -> None:
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdout=subprocess.DEVNULL)
print("child", child.pid)
time.sleep(60)
"""
    run = LessonRun(write(program))
    text = until(run, lambda output: output.text.endswith("\n")).text
    run.stop(10)
    assert not run.running()
    assert run.output().state is ChildState.STOPPED
    wait_for_end(int(text.split()[1]))


def test_one_at_a_time_the_last_of_each_name_is_kept_and_the_server_ends_it(
    write: Write, tmp_path: Path
) -> None:
    server = services.Services(tmp_path, tmp_path)
    server.devices()
    slow, quick = write(SLEEP, name="slow"), write("print('done')\n", name="quick")
    server.start_lesson(slow)
    first = server.lessons["slow"]
    assert server.running_lesson() is first
    with pytest.raises(RunError, match="“slow” is running"):
        server.start_lesson(quick)
    first.stop(10)
    server.start_lesson(quick)
    assert ended(server.lessons["quick"]).text == "done\n"
    assert server.lessons["slow"] is first
    assert first.output().state is ChildState.STOPPED
    server.start_lesson(slow)
    last = server.lessons["slow"]
    server.close()
    assert last.output().state is ChildState.STOPPED


LEAVING = ROOT / "tests" / "scripts" / "leaving"


@pytest.mark.timeout(400)  # compiling takes half a minute, on a busy machine much longer
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.name)
def test_it_runs_on_a_cpu_or_says_why_not(lesson: Lesson, tmp_path: Path) -> None:
    path = str(LEAVING) if lesson.ranks > 1 else ""
    finished = run(lesson, tmp_path, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    assert list(tmp_path.iterdir()) == []
    if lesson.name == "compile_modes" and not shutil.which("g++"):
        assert "C++" in finished.stderr
        return
    if lesson.needs_cuda:
        assert (finished.returncode, finished.stdout) == (1, "")
        assert finished.stderr.strip() == lesson.needs_cuda
        return
    assert (finished.returncode, finished.stderr) == (0, "")
    assert len(finished.stdout.splitlines()) >= 4
    assert [part for part in EXPECTED[lesson.name] if part not in finished.stdout] == []
    assert "result: False" not in finished.stdout
