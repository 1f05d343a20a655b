"""Values of this process, its children, its cgroup and host; the environment of a run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from stepscope.host import usage
from stepscope.host.environment import environment
from stepscope.host.usage import (
    REST,
    CgroupMemory,
    HostSampler,
    children_memory,
    container,
    kills_since,
    own_folder,
)
from tests.support.fake_nvml import FakeClock
from tests.support.git_repository import commit, git

GIB = 2**30


def test_process_cpu_is_cpu_time_per_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, cpu = FakeClock(), FakeClock()
    monkeypatch.setattr(time, "process_time", cpu)
    source = HostSampler(wall)
    assert "process/cpu" not in source.process()
    wall.now += 0.5
    cpu.now += 0.75
    assert source.process()["process/cpu"] == 150.0
    wall.now += 1
    assert source.process()["process/cpu"] == 0.0
    assert "process/cpu" not in source.process()  # no time has passed
    wall.now += 0.001
    cpu.now += 0.0042
    assert "process/cpu" not in source.process(), "420% from clocks read one after the other"
    wall.now += 0.999
    assert source.process()["process/cpu"] == pytest.approx(0.42)


def test_the_peak_is_the_highest_sample_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 300, 200, 150, 160])
    now = lambda _: SimpleNamespace(rss=next(sizes))  # noqa: E731
    monkeypatch.setattr(psutil.Process, "memory_info", now)
    source = HostSampler()
    peaks = [source.process()["process/peak_rss"] for _ in range(3)]
    assert peaks == [100.0, 300.0, 300.0]
    assert source.reset_peak() == (300.0, 150.0)
    found = source.process()
    assert (found["process/rss"], found["process/peak_rss"]) == (160.0, 160.0)


@pytest.mark.parametrize(
    ("own", "used", "total"),
    [
        (CgroupMemory(limit=4 * GIB, used=3 * GIB, idle_cache=GIB), 2 * GIB, 4 * GIB),
        (CgroupMemory(limit=4 * GIB, used=5 * GIB), 4 * GIB, 4 * GIB),
        (CgroupMemory(limit=64 * GIB, used=3 * GIB), 6 * GIB, 16 * GIB),
        (CgroupMemory(limit=4 * GIB), 6 * GIB, 16 * GIB),
        (CgroupMemory(), 6 * GIB, 16 * GIB),
    ],
)
def test_memory_is_the_smaller_one_of_container_and_host(
    monkeypatch: pytest.MonkeyPatch, own: CgroupMemory, used: int, total: int
) -> None:
    memory = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(usage, "container", lambda: own)
    found = HostSampler().host()
    assert (found["host/mem_used"], found["host/mem_total"]) == (used, total)


def test_the_environment_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment(None, None, tmp_path)["commit"] is None
    commit(tmp_path, {"a": "1"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 5})
    found = environment("580.65", "NVIDIA H100", tmp_path)
    expected = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "driver": "580.65",
        "gpu": "NVIDIA H100",
        "cores": 3,
        "host": socket.gethostname(),
        "commit": git(tmp_path, "rev-parse", "HEAD"),
    }
    assert found.items() >= expected.items()
    monkeypatch.delitem(sys.modules, "torch")
    found = environment(None, None, None)
    missing = {name for name, value in found.items() if value is None}
    assert missing == {"torch", "cuda", "cudnn", "driver", "gpu", "threads", "commit"}


# --- child processes and cgroups ---

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


def test_children_of_children_and_of_other_threads_count() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    before, found = children_memory(), []
    assert before is not None

    def start() -> None:
        with child(nested) as one:
            [inner] = one.children()
            whole = sum(each.memory_full_info().uss for each in (one, inner))
            found.append(((children_memory() or 0) - before) / whole)
            inner.kill()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [pytest.approx(1, abs=0.05)]
    assert children_memory() == pytest.approx(before, abs=2**20)


WRITES = """
import os, sys
from stepscope.host.usage import children_memory
shared = bytearray(b"x" * 2**26)
reader, writer = os.pipe()
wrote, write = os.pipe()
if os.fork() == 0:
    os.read(reader, 1)
    for page in range(0, len(shared), 4096):
        shared[page] = 1
    os.write(write, b"x")
    os.read(reader, 1)
    os._exit(0)
before = children_memory()
os.write(writer, b"x")
os.read(wrote, 1)
print(before, children_memory())
os.write(writer, b"x")
"""


def test_a_forked_child_counts_the_pages_that_it_has_written() -> None:
    """In a process of its own: what the parent writes meanwhile is the child's alone, too."""
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 2**23
    assert after - before == pytest.approx(2**26, rel=0.05)


def test_a_reading_is_followed_by_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    def slow() -> int:
        clock.now += 0.01
        return 5

    monkeypatch.setattr(usage, "children_memory", slow)
    host = HostSampler(clock)
    assert host.children() == {KEY: 5.0}
    assert host.children() == {}
    clock.now += 0.01 * REST
    assert host.children() == {KEY: 5.0}


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_the_limit_is_that_of_the_level_with_the_fewest_available_bytes(tmp_path: Path) -> None:
    job = write(tmp_path / "job", memory_max="1000\n", memory_current="800\n")
    task = write(job / "step" / "task", memory_max="max\n", memory_current="700\n")
    assert container(task) == CgroupMemory(limit=1000, used=800), "as Slurm sets it"
    write(job / "step", memory_max="900\n", memory_current="750\n")
    assert container(task) == CgroupMemory(limit=900, used=750)
    write(job, memory_stat="anon 5\ninactive_file 100\n", memory_current="990\n")
    assert container(task) == CgroupMemory(limit=1000, used=990, idle_cache=100)
    assert container(tmp_path / "nowhere") == CgroupMemory()


def test_a_process_has_what_its_container_leaves() -> None:
    limited = CgroupMemory(limit=1000, used=900, idle_cache=300)
    assert [limited.within(free) for free in (5000, 300)] == [400, 300]
    assert CgroupMemory(limit=1000, used=2000).within(5000) == 0
    assert CgroupMemory(used=900).within(5000) == 5000


def test_the_own_folder_is_found_also_from_within_a_container(tmp_path: Path) -> None:
    find = own_folder.__wrapped__  # without its cache
    table = tmp_path / "cgroup"
    table.write_text("0::/user.slice/job\n")
    assert find(tmp_path, table) is None
    write(tmp_path, memory_events="oom_kill 0\n")
    assert find(tmp_path, table) == tmp_path  # the path is the host's
    write(tmp_path / "user.slice/job", memory_events="oom_kill 0\n")
    assert find(tmp_path, table) == tmp_path / "user.slice/job"
    assert find(tmp_path, tmp_path / "nothing") is None


def test_kills_are_counted_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "ROOT", tmp_path)
    folder = write(tmp_path / "job", memory_events="oom_kill 5\n")
    first: dict[str, Any] = {"folder": str(folder), "count": 5}
    assert kills_since(first) == 0
    write(folder, memory_events="oom_kill 7\n")
    assert kills_since(first) == 2
    for text in ("", "oom_kill", "oom_kill many", "oom_kill -1", "\x00" * 9):
        write(folder, memory_events=text)
        assert kills_since(first) is None
    assert kills_since(first | {"folder": str(tmp_path.parent)}) is None
    assert kills_since(first | {"folder": f"{folder}/../../x"}) is None
    for hostile in (None, [], {}, {"folder": 3, "count": "x"}, first | {"count": True}):
        assert kills_since(hostile) is None
