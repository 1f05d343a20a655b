"""Collectives measured by real gloo ranks: results, an end at any time, no process left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stepscope.distributed.collective_metrics import bus_factor
from trainer.collectives.measurement import Measurement, read_result, result_names
from trainer.collectives.plan import KIB, MIB, OPERATIONS, CollectivePlan
from trainer.runners.child_process import ChildState

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


def test_the_command_measures_each_operation_and_size(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trainer.collectives", "--sizes", "1K,64K"),
            *("--seconds", "0.02", "--json", "--runs", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
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


def test_a_wrong_option_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.collectives", "--ranks", "1", "--runs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ranks: 2 to 64 processes, got 1.\n"


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Measurement]:
    """A measurement that takes a minute, with its first result."""
    measurement = Measurement(CollectivePlan(sizes=(KIB, MIB), seconds=6.0), tmp_path)
    try:
        until = time.monotonic() + SECONDS
        while not measurement.output().answer["rows"]:
            assert measurement.running(), measurement.output()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield measurement
    finally:
        measurement.stop()


def ranks_of(measurement: Measurement) -> list[psutil.Process]:
    launcher = psutil.Process(measurement._process.pid)
    found = [launcher, *launcher.children(recursive=True)]
    assert len(found) == 3
    return found


def test_stop_ends_all_ranks_and_keeps_what_was_measured(long: Measurement, tmp_path: Path) -> None:
    processes = ranks_of(long)
    long.stop()
    output = long.output()
    assert output.state is ChildState.STOPPED
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert long.saved == result_names(tmp_path)[0]
    assert read_result(tmp_path, str(long.saved))["status"] == "stopped"


def test_a_rank_that_dies_ends_it_with_a_reason(long: Measurement) -> None:
    processes = ranks_of(long)
    processes[-1].kill()
    assert long.wait(SECONDS)
    output = long.output()
    assert output.state is ChildState.FAILED
    assert output.reason is not None
    assert output.reason.startswith("torchrun ended with exit code 1. ")
    assert psutil.wait_procs(processes, timeout=5)[1] == []
