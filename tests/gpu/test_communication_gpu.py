"""Collectives over NCCL: bytes and times of a watched job.

On the simulator the bandwidth is the one that it was told to have; on GPUs nothing is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepscope.distributed import collective_metrics
from stepscope.distributed.collective_metrics import CollectiveMetrics
from stepscope.run import run_folders
from tests.conftest import Need
from tests.gpu.conftest import SIMULATED, waiting_raises
from tests.support.run_values import recorded
from tests.support.watched_scripts import SCRIPTS

ROOT = SCRIPTS.parents[1]
WIDTH = 16_384
"""Of the hidden layer: 2.5 MiB of gradients, enough to tell of the link."""
GIGABYTES = 0.025
"""Bus bandwidth of the simulator, GB/s: so little that its own computing does not count."""
SLOW = {"CUDASIM_NCCL_GBS": str(GIGABYTES)} if SIMULATED else {}
STEPS = 40 if SIMULATED else 500


@pytest.fixture(autouse=True)
def _two(need: Need) -> None:
    need(None if SIMULATED or torch.cuda.device_count() > 1 else "only one GPU here")


def started(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    steering = {"CUDASIM_DEVICES": "4"} if SIMULATED else {}
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ
        | {"STEPSCOPE_RUNS": str(folder), "OMP_NUM_THREADS": "1"}
        | steering
        | environ,
    )
    assert done.returncode == 0, done.stderr
    return done


def watched(folder: Path, *options: str) -> tuple[int, int, int]:
    """Watch a job of two ranks; return its bytes of gradients and of buffers, and its waits."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(SCRIPTS / "collectives.py"), "nccl", str(STEPS), str(WIDTH)]
    done = started([*torchrun, "-m", "stepscope.watch", *options, *script], folder, **SLOW)
    gradients, buffers, waits = map(int, done.stdout.split())
    return gradients, buffers, waits


def said(folder: Path) -> dict[str, str]:
    run_json = json.loads((folder / "run.json").read_text())
    reasons: dict[str, str] = run_json["capabilities"].get("collectives", {})
    return reasons


@pytest.mark.timeout(600)
def test_bytes_are_exact_and_times_appear_with_the_switch(tmp_path: Path) -> None:
    """A step's gradients take 2.8 MB / 0.025 GB/s, some 113 ms."""
    *_, waits = watched(tmp_path / "plain")
    [plain] = run_folders(tmp_path / "plain")
    gradients, buffers, waits_timed = watched(tmp_path / "timed", "--time-collectives")
    [timed] = run_folders(tmp_path / "timed")
    assert waits_timed == waits
    assert "--time-collectives" in said(plain)["comm/time"]
    for rank in (0, 1):
        for folder in (plain, timed):
            # The first may have seen DDP order its buckets, which it does once.
            assert recorded(folder, "comm/bytes", rank)[-1] == gradients + buffers
        assert recorded(plain, "comm/time", rank) == []
        times = recorded(timed, "comm/time", rank)
        assert times
        if SIMULATED:
            # Two ranks move an all_reduce once; waiting for each other adds to the time, the more
            # the busier the machine is. The first reading may have seen the end of few.
            least_s = gradients / (GIGABYTES * 1e9)
            assert least_s * 0.9 <= max(times)
            assert min(times) <= least_s * 4


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank: it records as any other."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_reading_waits_for_nothing_and_ends_no_capture(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_metrics, "rank_and_size", lambda: (0, 2))
    step, now = 0, 0.0
    found = CollectiveMetrics(wall=lambda: now)
    found.step = lambda: step
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert found.read() == 0.0, "a reading would end the capture"
        y = x + 1
    graph.replay()
    assert y.sum().item() == 2000.0
    torch.cuda.synchronize()
    for _ in range(3):
        step += 1
        with waiting_raises():
            torch.cuda._sleep(20_000_000)  # the device is behind: a wait would take 10 ms
            dist.all_reduce(x)
            now += 100.0
            assert found.read() > 0
        assert not torch.cuda.current_stream().query() or SIMULATED
    assert found.take()["comm/bytes"] == 4000.0
    assert not found._failed
