"""The lab with real processes: trials that end in every way, and sweeps of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.lab.folder import read_sweep
from stepscope.lab.trial_process import LOG, RUN, TrialProcess
from tests.support.waiting import wait_until
from trainer.config import Workload, defaults
from trainer.lab import trial_run

LONG = 10**8
SWEEP = ["--workload", "linear", "--device", "cpu", "--steps", "30", "--warmup", "5"]


def job(**given: Any) -> dict[str, Any]:
    config = defaults(Workload.LINEAR).to_dict()
    return {
        **{"config": config, "changes": {}, "seed": 3, "warmup": 10, "steps": 60},
        **given,
    }


def run_here(folder: Path, **given: Any) -> dict[str, Any]:
    """Run a trial in this process."""
    folder.mkdir()
    return trial_run.run_trial(job(**given) | {"folder": str(folder)})


def lab(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.lab", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEPSCOPE_RUNS": str(folder)},
    )


def test_a_trial_is_a_recorded_run_with_equal_losses_for_equal_seeds(tmp_path: Path) -> None:
    tempfile.mkdtemp(prefix=RUN, dir=tmp_path)  # of a killed sweep
    process = TrialProcess("trainer.lab.trial_run", tmp_path)
    first = process.take(job(), 120)
    assert list(tmp_path.glob(f"{RUN}*/")) == []
    metrics = first["metrics"]
    assert metrics["steps"] == 60
    assert metrics["samples_per_sec"] > 0
    assert metrics["step_time"] == pytest.approx(32 / metrics["samples_per_sec"], rel=0.2)
    assert metrics["peak_process"] > 2**26
    assert metrics["peak_allocated"] is None
    assert first["machine"]["torch"]
    same, other = (run_here(tmp_path / str(seed), seed=seed)["metrics"] for seed in (3, 4))
    assert metrics["loss"] == same["loss"] != other["loss"]
    assert first["seconds"] > 0


def test_what_cannot_train_is_a_reason(tmp_path: Path) -> None:
    refused = run_here(tmp_path / "refused", changes={"pin_memory": True})
    assert refused["reason"].startswith("pin_memory: ")
    nonsense = run_here(tmp_path / "nonsense", changes={"batch_size": 0})
    assert nonsense["reason"].startswith("Batch size must be ")
    diverged = run_here(tmp_path / "diverged", changes={"learning_rate": 100.0}, steps=300)
    assert diverged["metrics"]["loss"] is None
    assert diverged["metrics"]["loss_finite"] is False


def test_a_process_that_dies_is_a_reason(tmp_path: Path) -> None:
    process = TrialProcess("trainer.lab.trial_run", tmp_path)

    def kill() -> None:
        wait_until(lambda: bool(trials_of(os.getpid())))
        trials_of(os.getpid())[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    answer = process.take(job(steps=LONG), 120)
    killer.join()
    assert "killed (SIGKILL)" in answer["reason"]
    broken = process.take({"config": {}}, 120)
    assert "KeyError" in broken["reason"]
    assert (tmp_path / LOG).read_text().startswith("Traceback")


def test_a_time_out_is_a_reason_and_leaves_no_process(tmp_path: Path) -> None:
    answer = TrialProcess("trainer.lab.trial_run", tmp_path).take(job(steps=LONG), 1.0)
    assert "1 s" in answer["reason"]
    assert "metrics" not in answer
    wait_until(lambda: not trials_of(os.getpid()))


def trials_of(pid: int) -> list[psutil.Process]:
    """Return the trial processes below a process, its own children and theirs."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "trainer.lab.trial_run" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def test_a_sweep_from_the_command_line(tmp_path: Path) -> None:
    words = [*SWEEP, "--variants", "pin_memory,set_to_none=false", "--max-rounds", "1"]
    process = lab(tmp_path, *words)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    [folder] = (tmp_path / "lab").iterdir()
    found = read_sweep(folder)
    assert found["baseline"]["name"] == "baseline"
    assert {one["name"]: one["verdict"] for one in found["variants"]} == {
        "pin_memory": "impossible",
        "set_to_none=false": "undecided",
    }
    for variant in found["variants"]:
        assert {"effect", "low", "high", "resolution", "rounds", "reason"} <= set(variant)
    assert found["variants"][1]["rounds"] == 1
    assert "set_to_none" in stdout
    assert "set_to_none" in stderr
    assert found["status"] == "finished"


TWO_RANKS = {"strategy": "ddp", "devices_per_node": 2, "runner": "torchrun"}


def test_a_trial_of_two_ranks_counts_the_samples_of_both(tmp_path: Path) -> None:
    answer = TrialProcess("trainer.lab.trial_run", tmp_path).take(job(changes=TWO_RANKS), 150)
    metrics = answer["metrics"]
    assert metrics["steps"] == 60
    # The last step of an epoch may have fewer.
    samples_per_step = metrics["samples_per_sec"] * metrics["step_time"]
    assert 0.8 * 2 * 32 < samples_per_step <= 2 * 32 + 1e-6
    assert metrics["peak_process"] > 2**26
    assert answer["machine"]["torch"]
