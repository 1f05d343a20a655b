"""Collectives of real gloo ranks: a measurement with any end, and the records of a job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stepscope.distributed.collective_metrics import NOT_BY_GLOO, bus_factor
from stepscope.host.child_process import ChildState
from stepscope.run import run_folders
from tests.support.run_values import recorded
from tests.support.watched_scripts import run
from trainer.collectives.measurement import (
    KIB,
    OPERATIONS,
    CollectivePlan,
    Measurement,
    read_result,
    result_names,
)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


def command(runs: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "trainer.collectives", "--runs", str(runs), *options]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


def test_the_command_measures_each_operation_and_size(tmp_path: Path) -> None:
    done = command(tmp_path, "--sizes", "1K,64K", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["status"], document["backend"], document["ranks"]) == ("finished", "gloo", 2)
    rows = document["rows"]
    assert [(row["operation"], row["bytes"]) for row in rows] == [
        (operation, size) for operation in OPERATIONS for size in (KIB, 64 * KIB)
    ]
    for row in rows:
        assert row["fastest_s"] <= row["seconds"] <= row["slowest_s"]
        assert row["algorithm"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus"] == row["algorithm"] * (bus_factor(row["operation"], 2) or 0)
    [name] = result_names(tmp_path)
    assert f"Saved as {name}" in done.stderr
    assert read_result(tmp_path, name)["rows"] == rows


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Measurement]:
    """A measurement that takes a minute, with its first result."""
    measurement = Measurement(CollectivePlan(sizes=(KIB,) * 60), tmp_path)
    try:
        until = time.monotonic() + SECONDS
        while not measurement.output().answer["rows"]:
            assert measurement.running(), measurement.output()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield measurement
    finally:
        measurement.stop()


def its_processes() -> list[psutil.Process]:
    """The launcher of the measurement and its ranks."""
    every = psutil.Process().children(recursive=True)
    found = [one for one in every if "trainer.collectives" in " ".join(one.cmdline())]
    assert len(found) == 3
    return found


def test_stop_ends_all_ranks_and_keeps_what_was_measured(long: Measurement, tmp_path: Path) -> None:
    processes = its_processes()
    long.stop()
    output = long.output()
    assert output.state is ChildState.STOPPED
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert long.saved == result_names(tmp_path)[0]
    assert read_result(tmp_path, str(long.saved))["status"] == "stopped"


def test_a_rank_that_dies_ends_it_with_a_reason(long: Measurement) -> None:
    processes = its_processes()
    processes[-1].kill()
    assert long.wait(SECONDS)
    output = long.output()
    assert output.state is ChildState.FAILED
    assert "exit code 1" in str(output.reason)
    assert psutil.wait_procs(processes, timeout=5)[1] == []


@pytest.mark.parametrize("ranks", [2, 1])
def test_the_bytes_of_a_step_are_those_of_gradients_and_buffers(tmp_path: Path, ranks: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", "-m", "stepscope.watch"]
    ended = run([*command, "collectives.py", "gloo", "500", "64"], tmp_path, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr.decode()
    [folder] = run_folders(tmp_path)
    if ranks == 1:
        assert recorded(folder, "comm/bytes") == []
        assert "collectives" not in json.loads((folder / "run.json").read_text())["capabilities"]
        return
    # Two linear layers and a norm, whose running mean, variance and count DDP sends before each
    # forward pass.
    gradients, buffers, _ = map(int, ended.stdout.split())
    assert gradients == 4 * (32 * 64 + 64 + 64 + 64 + 64 * 8 + 8)
    assert buffers == 4 * (64 + 64) + 8
    for rank in (0, 1):
        values = recorded(folder, "comm/bytes", rank)
        # The first may have seen DDP order its buckets, which it does once.
        assert set(values[1:] or values) == {float(gradients + buffers)}
        rates = recorded(folder, "comm/rate", rank)
        assert len(rates) == len(values)
        assert min(rates) > 0
        assert recorded(folder, "comm/time", rank) == []
    said = json.loads((folder / "run.json").read_text())["capabilities"]["collectives"]
    assert said["comm/time"] == NOT_BY_GLOO
