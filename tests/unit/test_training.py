"""The state of a run: which kernel an optimizer takes, and a schedule stretched by a resume."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import Optimizer, Parallel, Precision, RunConfig, Runner, Schedule
from trainer.training.compute import CpuCompute
from trainer.training.saving import save
from trainer.training.state import Training


def training(**changes: object) -> Training:
    config = RunConfig(**{"epochs": 3, "schedule": Schedule.COSINE, **changes})  # type: ignore[arg-type]
    return Training(config, nn.Linear(2, 1), CpuCompute())


def one_epoch(run: Training) -> None:
    run.model(torch.ones(1, 2)).sum().backward()
    run.optimizer.step()
    run.next_epoch(0.0)


KERNELS = [(True, False), (False, True), (False, False)]  # fused, foreach


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize(("fused", "foreach"), KERNELS)
def test_the_switches_choose_the_kernel_of_the_optimizer(
    optimizer: Optimizer, fused: bool, foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None for both would let torch choose; counted is which of torch's functions is called."""
    module = importlib.import_module(f"torch.optim.{'sgd' if optimizer == 'sgd' else 'adam'}")
    name = "sgd" if optimizer is Optimizer.SGD else "adam"
    called: list[str] = []

    def counted(kind: str) -> None:
        whole = f"_{kind}_{name}"
        real = getattr(module, whole)

        def count(*args: Any, **options: Any) -> None:
            called.append(kind)
            real(*args, **options)

        monkeypatch.setattr(module, whole, count)

    for kind in ("fused", "multi_tensor", "single_tensor"):
        counted(kind)
    one_epoch(training(optimizer=optimizer, fused=fused, foreach=foreach))
    assert called == ["fused" if fused else "multi_tensor" if foreach else "single_tensor"]


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize(("fused", "foreach"), KERNELS)
def test_a_resumed_run_takes_its_own_kernel(
    optimizer: Optimizer, fused: bool, foreach: bool
) -> None:
    """Else fp16's scaler hands its scale to a kernel that refuses it."""
    first = training(optimizer=optimizer, fused=not fused)
    one_epoch(first)
    second = training(optimizer=optimizer, fused=fused, foreach=foreach)
    second.load(copy.deepcopy(first.state_dict()))
    group = second.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (fused, foreach)
    one_epoch(second)


def test_adam_in_pure_fp16_divides_by_no_root_that_has_become_zero() -> None:
    def epsilon(precision: Precision) -> float:
        return float(training(precision=precision).optimizer.defaults["eps"])

    assert epsilon(Precision.PURE_FP16) == 1e-3
    assert {epsilon(p) for p in (Precision.FP32, Precision.BF16, Precision.PURE_BF16)} == {1e-8}


def test_a_cosine_goes_on_over_more_epochs_as_if_it_had_known() -> None:
    first, whole, resumed = training(), training(epochs=6), training(epochs=6)
    for run in (first, whole):
        for _ in range(3):
            one_epoch(run)
    assert first.learning_rate == pytest.approx(0, abs=1e-9)
    resumed.load(copy.deepcopy(first.state_dict()))
    for _ in range(3):
        assert resumed.learning_rate == pytest.approx(whole.learning_rate)
        assert resumed.learning_rate > 1e-5
        one_epoch(whole)
        one_epoch(resumed)
    assert resumed.learning_rate == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_changed_learning_rate_counts_where_the_schedule_stands(schedule: Schedule) -> None:
    first = training(schedule=schedule, learning_rate=0.1)
    whole = training(schedule=schedule, learning_rate=0.02)
    resumed = training(schedule=schedule, learning_rate=0.02, epochs=5)
    for run in (first, whole):
        one_epoch(run)
    state = copy.deepcopy(first.state_dict())
    resumed.load(state)
    if schedule is not Schedule.COSINE:  # a cosine over more epochs stands higher
        assert resumed.learning_rate == pytest.approx(whole.learning_rate)
    one_epoch(resumed)
    longer = training(schedule=schedule, learning_rate=0.02, epochs=5)
    for _ in range(2):
        one_epoch(longer)
    assert resumed.learning_rate == pytest.approx(longer.learning_rate)
    taken, changed = resumed.from_checkpoint(state)
    assert changed == {"epochs": [3, 5], "learning_rate": [0.1, 0.02]}
    assert not any("learning rate" in words for words in taken)


def test_what_comes_from_the_checkpoint_is_named() -> None:
    first, resumed = training(seed=1), training(seed=2)
    one_epoch(first)
    state = copy.deepcopy(first.state_dict())
    resumed.load(state)
    taken, changed = resumed.from_checkpoint(state)
    assert taken == [
        "weights",
        "state of adam",
        "place in the cosine schedule",
        f"learning rate {first.learning_rate:.4g}",
        "random numbers",
        "order of the samples",
    ]
    assert changed == {"seed": [1, 2]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_disk_that_refuses_the_file_gets_the_space_of_its_parts_back(tmp_path: Path) -> None:
    run = training(device="cpu", runner=Runner.TORCHRUN, parallel=Parallel.FSDP, ranks=2)
    save(tmp_path / "best.pt", run)
    before = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "last.pt").mkdir()  # a file cannot take its place
    with pytest.raises(OSError, match=r"last\.pt"):
        save(tmp_path / "last.pt", run)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*before, "last.pt"]
