"""Collectives over NCCL: bytes of a watched job."""

from __future__ import annotations

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
"""Of the hidden layer: 2.5 MiB of gradients."""
SLOW = {"CUDASIM_NCCL_GBS": "0.025"} if SIMULATED else {}
"""Bus bandwidth of the simulator: steps take 0.1 s, and the job is read several times."""
STEPS = 40 if SIMULATED else 500


@pytest.fixture(autouse=True)
def _two(need: Need) -> None:
    need(None if SIMULATED or torch.cuda.device_count() > 1 else "only one GPU here")


@pytest.mark.timeout(600)
def test_the_bytes_of_a_step_are_exact(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(SCRIPTS / "collectives.py"), "nccl", str(STEPS), str(WIDTH)]
    devices = {"CUDASIM_DEVICES": "4"} if SIMULATED else {}
    done = subprocess.run(
        [*torchrun, "-m", "stepscope.watch", *script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"STEPSCOPE_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"} | devices | SLOW,
    )
    assert done.returncode == 0, done.stderr
    gradients, buffers, _ = map(int, done.stdout.split())
    [folder] = run_folders(tmp_path)
    for rank in (0, 1):
        # The first may have seen DDP order its buckets, which it does once.
        assert recorded(folder, "comm/bytes", rank)[-1] == gradients + buffers


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
