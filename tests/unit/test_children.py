"""Memory of child processes: real ones, and how often they are asked."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from stepscope.host.usage import REST, ChildProcessMemory, resident
from tests.support.fake_nvml import FakeClock

KEY = "process/children_rss"
SLEEP = "print(flush=True); input()"


@contextmanager
def child(code: str = SLEEP) -> Iterator[psutil.Process]:
    """A process that has begun, and waits."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def test_children_count_while_they_live() -> None:
    before = resident()
    assert before is not None
    with child() as one, child() as other:
        expected = one.memory_info().rss + other.memory_info().rss
        found = resident()
        assert found is not None
        assert found - before == pytest.approx(expected, rel=0.05)
    assert resident() == before


def test_children_of_children_and_of_threads_count() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    before, found = resident(), []
    assert before is not None

    def start() -> None:
        with child(nested) as one:
            [inner] = one.children()
            whole = one.memory_info().rss + inner.memory_info().rss
            found.append(((resident() or 0) - before) / whole)
            inner.kill()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [pytest.approx(1, rel=0.05)]


def test_a_reading_is_followed_by_a_rest() -> None:
    clock = FakeClock()

    def slow() -> int:
        clock.now += 0.01
        return 5

    children = ChildProcessMemory(clock=clock, read=slow)
    assert children.values() == {KEY: 5.0}
    assert children.values() == {}
    clock.now += 0.01 * REST
    assert children.values() == {KEY: 5.0}


def test_where_nobody_lists_them_there_is_no_value() -> None:
    assert ChildProcessMemory(read=lambda: None).values() == {}
    assert ChildProcessMemory(read=lambda: 0).values() == {KEY: 0.0}
