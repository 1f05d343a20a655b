"""Collectives over NCCL: bytes and times of a watched job, and the bandwidth that is measured.

On the simulator the bandwidth is the one that it was told to have; on GPUs nothing is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.run import run_folders
from tests.conftest import Need
from tests.gpu.conftest import SIMULATED
from tests.integration.test_collectives_recorded import recorded
from tests.integration.test_watch_scripts import SCRIPTS

ROOT = SCRIPTS.parents[1]
WIDTH = 16_384
"""Of the hidden layer: 2.5 MiB of gradients, enough to tell of the link."""
GIGABYTES = 0.05
"""Bus bandwidth of the simulator, GB/s: so little that its own computing does not count."""


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


def watched(folder: Path, *options: str, steps: int = 400, **environ: str) -> list[int]:
    """Watch a job of two ranks; return its bytes of gradients and buffers, and its waits."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    watch = ["-m", "stepscope.watch", *options, str(SCRIPTS / "collectives.py")]
    done = started([*torchrun, *watch, "nccl", str(steps), str(WIDTH)], folder, **environ)
    return list(map(int, done.stdout.split()))


def said(folder: Path) -> dict[str, str]:
    run_json = json.loads((folder / "run.json").read_text())
    reasons: dict[str, str] = run_json["capabilities"].get("collectives", {})
    return reasons


@pytest.mark.timeout(400)
def test_bytes_are_exact_and_no_step_waits_for_the_device(tmp_path: Path) -> None:
    gradients, buffers, waits = watched(tmp_path)
    assert waits == 0
    [folder] = run_folders(tmp_path)
    for rank in (0, 1):
        values = recorded(folder, "comm/bytes", rank)
        assert set(values) == {float(gradients + buffers)}
        assert recorded(folder, "comm/time", rank) == []
    assert "--time-collectives" in said(folder)["comm/time"]


@pytest.mark.timeout(400)
def test_with_timing_times_and_bus_bandwidth_appear(tmp_path: Path) -> None:
    """A pass over the link takes 2.5 MiB / 0.05 GB/s, some 55 ms of each step."""
    environ = {"CUDASIM_NCCL_GBS": str(GIGABYTES)} if SIMULATED else {}
    gradients, _, waits = watched(tmp_path, "--time-collectives", steps=80, **environ)
    assert waits == 0
    [folder] = run_folders(tmp_path)
    for rank in (0, 1):
        assert recorded(folder, "comm/bytes", rank)
        times, shares = (recorded(folder, f"comm/{key}", rank) for key in ("time", "share"))
        bandwidths = recorded(folder, "comm/bus_bandwidth", rank)
        assert times
        assert len(times) == len(shares) == len(bandwidths)
        if SIMULATED:
            # Two ranks move an all_reduce once; waiting for each other adds to the time.
            least_s = gradients / (GIGABYTES * 1e9)
            assert all(least_s * 0.95 <= time <= least_s * 2 for time in times)
            assert all(0 < share <= 110 for share in shares)
            assert all(bus <= GIGABYTES * 1e9 * 1.05 for bus in bandwidths)
            assert max(bandwidths) >= GIGABYTES * 1e9 * 0.6
    assert said(folder) == {}


def measured(folder: Path, ranks: int, **environ: str) -> list[dict[str, Any]]:
    command = [
        *(sys.executable, "-m", "trainer.collectives", "--backend", "nccl", "--json"),
        *("--ranks", str(ranks), "--sizes", "1M", "--seconds", "0.2", "--runs", str(folder)),
    ]
    rows: list[dict[str, Any]] = json.loads(started(command, folder, **environ).stdout)["rows"]
    return rows


@pytest.mark.timeout(400)
def test_the_measurement_finds_the_bandwidth_that_there_is(tmp_path: Path) -> None:
    ranks = 4 if SIMULATED else min(4, torch.cuda.device_count())
    environ = {"CUDASIM_NCCL_GBS": str(GIGABYTES)} if SIMULATED else {}
    rows = measured(tmp_path, ranks, **environ)
    assert [row["operation"] for row in rows if "reason" in row] == []
    if SIMULATED:
        # all_to_all is made of messages, which the simulator gives no least time.
        found = {row["operation"]: row["bus"] / 1e9 for row in rows}
        del found["all_to_all"]
        assert found == {name: pytest.approx(GIGABYTES, rel=0.15) for name in found}
        assert len(found) == 4
