"""Trials of a script with several ranks: their figures, settings, common end, and the plan."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.lab import script_trial, torchrun
from stepscope.lab.measurement import measured
from stepscope.lab.script_plan import ScriptPlan, parse_variant, script_command
from stepscope.run import process_identity, write_run_json
from stepscope.watch import trial
from stepscope.watch.trial import TRIAL
from tests.support.recorded_runs import CREATED, write_run
from tests.support.run_folders import RankFolder
from tests.support.trial_sessions import TrialSession

SECONDS = (0.1, 0.15)
WATTS = {"GPU-a": 100.0, "GPU-b": 60.0}


def job_of(folder: Path, devices: list[str], samples: list[float | None], **entries: Any) -> Path:
    """Write a job of two ranks of 40 steps; local rank 0 samples both GPUs."""
    gpus = {
        gpu: [(0.1 * i, 0, {"gpu/energy": watts * 0.1 * i, "gpu/power": watts}) for i in range(70)]
        for gpu, watts in WATTS.items()
    }
    for rank, (device, each) in enumerate(zip(devices, samples, strict=True)):
        values = {"perf/step_time": SECONDS[rank], "train/loss": 2.0 + rank}
        values |= {} if each is None else {"perf/samples_per_sec": each / SECONDS[rank]}
        # The ranks wait for each other: a step ends on both when rank 1 ends it.
        steps = [(0.15 * i, i, values) for i in range(1, 41)]
        memory = [(0.15 * i, i, {"memory/peak_allocated": 1e9 * (rank + 1)}) for i in range(1, 41)]
        given = {"device": device, "world_size": 2, "rank": rank, "created": CREATED}
        given |= entries
        write_run(folder, given, rank=rank, steps=steps, samples=memory, gpus={} if rank else gpus)
        if rank:
            ended = {"status": "finished", "heartbeat": CREATED}
            write_run_json(folder, given | ended | process_identity(), "rank1.json")
    return folder


def test_the_figures_of_a_job_are_those_of_all_ranks(tmp_path: Path) -> None:
    found = measured(job_of(tmp_path / "job", ["GPU-b", "GPU-a"], [32.0, 16.0]), 5, 2)
    assert found["step_time"] == pytest.approx(0.15)
    assert found["samples_per_sec"] == pytest.approx(48 / 0.15)
    assert found["peak_allocated"] == 2e9
    assert found["loss"] == 2.0
    assert found["energy_per_sample"] == pytest.approx(160 * 0.15 / 48, rel=0.02)


@pytest.mark.parametrize(
    ("devices", "watts"),
    [(["GPU-a", "GPU-a"], 100.0), (["GPU-a", "GPU-c"], None), (["cpu", "cpu"], None)],
)
def test_the_energy_of_each_gpu_counts_once(
    tmp_path: Path, devices: list[str], watts: float | None
) -> None:
    energy = measured(job_of(tmp_path / "job", devices, [32.0, 16.0]), 5, 2)["energy_per_sample"]
    assert energy == (watts and pytest.approx(watts * 0.15 / 48, rel=0.02))


def test_steps_of_ranks_are_not_added(tmp_path: Path) -> None:
    """One rank has no DataLoader, so that the samples of the job are unknown."""
    found = measured(job_of(tmp_path / "job", ["cpu", "cpu"], [32.0, None]), 5, 2)
    assert found["rate_unit"] == "steps/s"
    assert found["samples_per_sec"] == pytest.approx(1 / 0.15)


@pytest.mark.parametrize("state", ["in effect", "refused"])
def test_a_trial_counts_only_if_its_settings_are_in_effect(tmp_path: Path, state: str) -> None:
    settings = [{"name": "fused", "state": state, "text": "The reason."}]
    ended = {"refused": None, "stops": False}
    job_of(tmp_path / "runs/a", ["cpu", "cpu"], [32.0, 16.0], trial=ended, settings=settings)
    job = {"warmup": 5, "changes": {}}
    found = script_trial._result(tmp_path, 0, job, 2)
    assert found["settings"][0]["state"] == state
    if state == "in effect":
        assert found["metrics"]["steps"] == 40 - 5
    else:
        assert found["reason"] == f"fused {state}: Rank 0: The reason."
    assert "metrics" in script_trial._result(tmp_path, 0, job | {"probe": ["fused"]}, 2)


def test_the_words_of_the_script_are_not_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    run = importlib.import_module("torch.distributed.run")
    monkeypatch.setattr(run, "run", started.append)
    monkeypatch.setattr(torchrun, "set_parent_death_signal", lambda: None)
    monkeypatch.setenv(TRIAL, "{}")
    words = ["--with", "tf32", "train.py", "--log", "1", "--no", "3", "-m", "2"]
    torchrun.main(["--nproc-per-node", "2", "-m", "stepscope.watch", *words])
    (parsed,) = started
    assert (parsed.nproc_per_node, parsed.module) == ("2", True)
    assert [parsed.training_script, *parsed.training_script_args] == ["stepscope.watch", *words]


def test_secrets_are_not_shown_and_the_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = ["--api-key", "x1", "--lr", "1"]
    script = script_command("train.py", words, is_module=False, nproc_per_node=2)
    variants = (parse_variant("env:HF_TOKEN=x2"), parse_variant("key: --api-key x3"))
    plan = ScriptPlan(script=script, variants=variants)
    assert plan.label == "2 ranks: train.py --api-key '(hidden)' --lr 1"
    assert [variant.label for variant in variants] == [
        "env:HF_TOKEN=(hidden)",
        "--api-key '(hidden)'",
    ]
    assert variants[0].changes == {"env:HF_TOKEN": "x2"}


def test_a_rank_waits_for_the_last_step_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RankFolder(tmp_path)
    for rank, status in ((0, "finished"), (1, "running")):
        folder.rank(rank, status, created=CREATED, world_size=2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(trial, "rank_and_size", lambda: (0, 2))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        folder.rank(1, "finished", created=CREATED, world_size=2)

    monkeypatch.setattr(trial, "time", SimpleNamespace(sleep=sleep))
    session = TrialSession(folder.folder, world_size=2)
    limit = session.limit(ranks=2, parent=123)
    session.boundary(limit, step=3)
    with pytest.raises(SystemExit):
        session.boundary(limit, step=4)
    assert len(waits) == 1
