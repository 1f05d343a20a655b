"""Values of process and host, with injected clocks, and the environment that a run records."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from stepscope.host import usage
from stepscope.host.environment import environment
from stepscope.host.usage import CgroupMemory, HostSampler
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
