"""What NVML tells beside a training: whose memory it is, energy, activity, links, MIG instances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.common.metrics import Stream
from stepscope.gpu.process_memory import OTHERS, OWN
from stepscope.gpu.source import DeviceSource, open_source
from stepscope.run import RunKind, RunStatus
from stepscope.session.session import Session
from stepscope.store.reader import StoreReader
from tests.gpu.conftest import SIMULATED
from tests.support.child_process import ROOT
from tests.support.run_values import run_json
from trainer.training.devices import gpu_uuid

MIB = 2**20
HELD = 256 * MIB
CYCLES_A_SECOND = 2_000_000_000


@pytest.fixture
def source(need: Callable[[str | None], None]) -> DeviceSource:
    torch.zeros(1, device="cuda")
    source = open_source(reader="test")
    need(source.reason)
    return source


def device_values(folder: Path, key: str, stream: str = Stream.DEVICES) -> tuple[np.ndarray, ...]:
    """Return times and values of a metric, gaps left out."""
    with StoreReader(folder) as reader:
        info = next(series for series in reader.series() if series.stream == stream)
        block = reader.read(info.id, 0, info.rows, 1)
    values = block.mean[block.keys.index(key)]
    known = ~np.isnan(values)
    return block.ts[known], values[known]


def both_listed(neighbor: int, listed: Collection[int]) -> None:
    """Skip where a container's driver lists no processes, or by the host's numbers."""
    both = {neighbor, os.getpid()} <= set(listed)
    if not both and not SIMULATED:
        pytest.skip("this driver does not list these processes by their numbers (a container)")
    assert both


def record(folder: Path, seconds: float, work: Callable[[], None]) -> Path:
    """Record a run of this process, which trains on the first GPU, while it works."""
    folder.mkdir()
    session = Session(folder, name="devices", kind=RunKind.TRAINER)
    gpu = {"uuid": gpu_uuid(0), "name": torch.cuda.get_device_name(0)}
    session.sample(open_source(), [gpu], allocator_index=0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        work()
    session.close(RunStatus.FINISHED)
    return folder


def half_busy() -> None:
    """Keep the device busy for about half of the time."""
    torch.cuda._sleep(CYCLES_A_SECOND // 5)
    torch.cuda.synchronize()
    time.sleep(0.2)


@pytest.mark.alone
def test_energy_is_the_integral_of_power(source: DeviceSource, tmp_path: Path) -> None:
    """On a GPU roughly: its power is an average of the driver's, or read now and then."""
    folder = record(tmp_path / "run", 5.0, half_busy)
    when, energy = device_values(folder, "gpu/energy")
    times, power = device_values(folder, "gpu/power")
    inner = (times >= when[0]) & (times <= when[-1])
    integral = float(np.trapezoid(power[inner], times[inner]))
    joules = float(energy[-1] - energy[0])
    seconds = float(when[-1] - when[0])
    assert seconds > 2
    covered = integral * seconds / float(times[inner][-1] - times[inner][0])
    assert covered == pytest.approx(joules, rel=0.1 if SIMULATED else 0.3)
    if SIMULATED:  # 72 W idle and 560 W busy: half of both, so not a constant
        assert 1.3 * 72 < joules / seconds < 0.9 * 560


def test_a_run_records_its_share_of_the_memory_and_its_neighbors(
    source: DeviceSource, other: subprocess.Popen[str], tmp_path: Path
) -> None:
    tensor = torch.ones(HELD, dtype=torch.uint8, device="cuda")
    folder = record(tmp_path / "run", 2.5, lambda: time.sleep(0.05))
    listed = run_json(folder).get("gpu_processes", {}).get(gpu_uuid(0), [])
    both_listed(other.pid, {one["pid"] for one in listed})
    assert set(listed[0]) == {*("pid", "user", "name", "command", "memory", "yours", "state")}
    _, own = device_values(folder, OWN, Stream.SAMPLES)
    assert len(own) >= 2
    assert own[-1] >= torch.cuda.memory_reserved()
    if SIMULATED:
        _, others = device_values(folder, OTHERS)
        assert others[-1] >= HELD
    del tensor


LARGE = 512 * MIB
OTHER = f"""
import sys, torch
held = torch.zeros({LARGE}, dtype=torch.uint8, device="cuda:0")
small = torch.randn(256, 256, device="cuda:0")
torch.cuda.synchronize()
print("ready", flush=True)
for _ in range(10_000_000):
    small = (small @ small).clamp(-1, 1)
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A program of this user that holds memory and computes."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, "--api-token", "s3cr3t"],
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def stepscope(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope.cli", "devices", *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def this_gpu(found: dict[str, Any]) -> dict[str, Any]:
    uuid = gpu_uuid(0)
    (device,) = [device for device in found["devices"] if device["uuid"] == uuid]
    return dict(device)


def test_devices_as_json_show_another_process_and_its_memory(
    other: subprocess.Popen[str], need: Callable[[str | None], None]
) -> None:
    need(open_source().reason)
    device = this_gpu(json.loads(stepscope("--json")))
    values, health = device["values"], device["health"]
    total = torch.cuda.get_device_properties(0).total_memory
    assert values["gpu/mem_total"] == pytest.approx(total, rel=0.1)
    assert LARGE <= values["gpu/mem_used"] <= values["gpu/mem_total"]
    assert values["gpu/util"] > 0
    assert health["level"] in ("ok", "notice", "warning")
    assert device["name"] == torch.cuda.get_device_name(0)
    missing = device["missing"]
    assert not missing.keys() & values.keys()
    assert all(missing.values()), "each gap has its reason"
    if device["processes"] is None:  # a container that hides them says so
        assert missing["processes"]
        return
    (found,) = [process for process in device["processes"] if process["pid"] == other.pid]
    assert (found["yours"], found["state"], found["kind"]) == (True, "running", "compute")
    assert found["memory"] is None or found["memory"] >= LARGE
    assert "s3cr3t" not in found["command"]
