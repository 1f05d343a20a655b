"""Each switch of loading on a CPU: what it changes, and that the losses stay the same."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.decoded import Decoded
from tests.support.run_values import metric, run_json
from tests.support.training_runs import background, save_at_step, small, train
from tests.support.waiting import wait_for
from trainer.config import RunConfig, Workload
from trainer.training.accelerator import CpuAccelerator
from trainer.training.loaders import Loader
from trainer.workloads.build import WORKLOADS
from trainer.workloads.task import Split, Task

SAMPLES = 40


def decoded(folder: Path, samples: int = SAMPLES, **options: Any) -> Decoded:
    folder.mkdir(exist_ok=True)
    for index in range(samples):
        (folder / str(index)).write_text(str(float(index)))
    return Decoded(folder, samples, **options)


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{"batch_size": 4, "num_workers": 2, **changes})


def targets_of(loader: Loader, order: Tensor) -> list[list[int]]:
    return [targets.tolist() for _, targets in loader.batches(order)]


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_stay_or_start_anew_each_epoch(tmp_path: Path, persistent: bool) -> None:
    split = decoded(tmp_path / "data")
    order = torch.randperm(SAMPLES)
    seen = []
    with closing(Loader(split, config(persistent_workers=persistent), CpuAccelerator())) as loader:
        for _ in range(3):
            assert sum(targets_of(loader, order), []) == order.tolist()
            seen.append(set(split.asked()))
            assert (len(multiprocessing.active_children()) == 2) == persistent
    first, _, last = seen
    assert len(first) == 2
    assert len(last) == (2 if persistent else 6), "each epoch has processes of its own"
    assert os.getpid() not in last
    assert multiprocessing.active_children() == []
    loader = Loader(split, config(persistent_workers=persistent), CpuAccelerator())
    next(loader.batches(order))
    loader.close()  # within an epoch
    assert multiprocessing.active_children() == []


def drawn(split: Split, seed: int) -> Tensor:
    """The inputs of two epochs, from one loader."""
    with closing(Loader(split, config(seed=seed), CpuAccelerator())) as loader:
        order = torch.arange(SAMPLES)
        return torch.stack(
            [torch.cat([inputs for inputs, _ in loader.batches(order)]) for _ in range(2)]
        )


def test_random_numbers_in_workers_follow_the_seed(tmp_path: Path) -> None:
    split = decoded(tmp_path / "data", noisy=True)
    first, second = drawn(split, seed=0)
    assert not torch.equal(first, second)
    assert torch.equal(drawn(split, seed=0)[0], first)
    assert not torch.equal(drawn(split, seed=1)[0], first)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A workload whose samples are in files, in place of a built-in one."""

    def build(config: RunConfig) -> Task:
        return Task(
            model=nn.Linear(1, SAMPLES),
            train=decoded(tmp_path / "train"),
            validation=decoded(tmp_path / "validation", 6),
            loss=nn.CrossEntropyLoss(),
        )

    monkeypatch.setitem(WORKLOADS, Workload.DIGITS_MLP, build)
    yield
    assert multiprocessing.active_children() == []


SWITCHES: list[dict[str, Any]] = [
    {"num_workers": 1, "prefetch_factor": 4},
    {"num_workers": 2, "persistent_workers": False, "gradient_accumulation_steps": 3},
]


@pytest.mark.parametrize("changes", SWITCHES, ids=lambda changes: ",".join(changes))
def test_every_way_of_loading_gives_the_same_losses_and_resumes(
    changes: dict[str, Any], files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulation = changes.get("gradient_accumulation_steps", 1)
    base = small(
        Workload.DIGITS_MLP, batch_size=4, epochs=3, gradient_accumulation_steps=accumulation
    )
    plain = train(tmp_path, "plain", base)
    steps = -(-10 // accumulation)
    save_at_step(monkeypatch, steps + 2)
    changed = replace(base, **changes)
    assert np.array_equal(train(tmp_path, "changed", changed), plain)
    assert len(plain) == 3 * steps
    again = replace(changed, resume_from=f"changed/step-{steps + 2}.pt")
    assert np.array_equal(train(tmp_path, "resumed", again), plain[steps + 2 :])
    validated = [metric(tmp_path / name, "val/loss") for name in ("plain", "changed", "resumed")]
    assert np.array_equal(validated[0], validated[1])
    assert np.array_equal(validated[0][1:], validated[2])


def test_stop_ends_the_workers_of_training_and_validation(files: None, tmp_path: Path) -> None:
    endless = small(Workload.DIGITS_MLP, batch_size=4, epochs=10_000, num_workers=1)
    folder = tmp_path / "run"
    folder.mkdir()
    with background(endless, folder) as stop:
        wait_for(lambda: run_json(folder).get("step", 0) > 25, 60)
        stop.set()
        wait_for(lambda: run_json(folder)["status"] == "stopped")
    wait_for(lambda: multiprocessing.active_children() == [])


def test_a_killed_worker_of_one_epoch_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    config = small(Workload.DIGITS_MLP, epochs=10_000, num_workers=1, persistent_workers=False)
    with background(config, tmp_path):
        wait_for(lambda: run_json(tmp_path).get("step", 0) > 5)
        # One may just have ended by itself with its epoch, so each that comes is killed.
        wait_for(lambda: kill_workers() or run_json(tmp_path)["status"] == "failed")
    assert "num_workers" in run_json(tmp_path)["reason"]
    wait_for(lambda: multiprocessing.active_children() == [])


def kill_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()
