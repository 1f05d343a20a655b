"""What sampled steps show of learning, and the findings; each fault beside a healthy script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope.diagnosis.learning import (
    LearningRecord,
    LossBreak,
    learning_diagnoses,
    read_learning,
)
from stepscope.run_setup import RunSetup
from stepscope.session.training_facts import NonFinite, TrainingFacts
from stepscope.store import StoreReader
from stepscope.store.blocks import Event
from stepscope.store.writer import StoreWriter
from tests.support.fake_live import FakeLive, hooked
from tests.support.recorded_runs import CREATED, Row, write_run

SCRIPT = RunSetup(on_gpu=False, own=False)
STEPS = 12


@pytest.fixture
def live() -> Iterator[FakeLive]:
    with hooked() as live:
        yield live


def train(
    model: nn.Module,
    clear: Callable[[torch.optim.Optimizer], None],
    parameters: list[nn.Parameter] | None = None,
) -> None:
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.01)
    for _ in range(STEPS):
        clear(optimizer)
        model(torch.ones(2, 3)).pow(2).mean().backward()
        optimizer.step()


def causes(live: FakeLive) -> list[str | None]:
    found = learning_diagnoses(LearningRecord(), live.observer.facts, SCRIPT)
    assert all(one.kind == "no-learning" for one in found)
    return [one.cause for one in found]


def nothing(optimizer: torch.optim.Optimizer) -> None:
    pass


def by_data(optimizer: torch.optim.Optimizer) -> None:
    """As old tutorials do, which the gradient's version does not show."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.data.zero_()


def set_to_none(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


CLEARING = [
    torch.optim.Optimizer.zero_grad,
    lambda optimizer: optimizer.zero_grad(set_to_none=False),
    by_data,
    set_to_none,
]


@pytest.mark.parametrize("clear", [*CLEARING, nothing])
def test_gradients_that_are_never_cleared(live: FakeLive, clear: Any) -> None:
    train(nn.Linear(3, 1), clear)
    assert causes(live) == (["gradients-never-cleared"] if clear is nothing else [])


@pytest.mark.parametrize(("clears", "found"), [(True, []), (False, ["gradients-never-cleared"])])
def test_two_networks_that_take_turns(live: FakeLive, clears: bool, found: list[str]) -> None:
    """The generator's backward() adds to the discriminator's gradients, which are cleared later."""
    generator = nn.Linear(2, 3)
    discriminator = nn.Linear(3, 1)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.01)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    for _ in range(STEPS):
        made = generator(torch.ones(2, 2))
        if clears:
            of_discriminator.zero_grad()
        discriminator(made.detach()).pow(2).mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator(made).mean().backward()
        of_generator.step()
    assert causes(live) == found


def test_an_optimizer_of_parameters_that_the_loss_does_not_use(live: FakeLive) -> None:
    train(nn.Linear(3, 1), torch.optim.Optimizer.zero_grad, list(nn.Linear(3, 1).parameters()))
    assert causes(live) == ["no-gradient"]
    assert live.observer.facts.learning is not None
    assert live.observer.facts.learning.built.startswith("test_learning.py:")


def test_one_unused_parameter_is_no_finding(live: FakeLive) -> None:
    model = nn.Linear(3, 1)
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(1))]
    train(model, torch.optim.Optimizer.zero_grad, parameters)
    assert causes(live) == []


@pytest.mark.parametrize(
    ("layer", "trains", "found"),
    [
        (nn.Dropout(), False, ["eval-mode"]),
        (nn.Dropout(), True, []),
        (nn.BatchNorm1d(1), True, []),
        (nn.ReLU(), False, []),  # computes the same in both modes
    ],
)
def test_a_model_in_eval_mode(live: FakeLive, layer: nn.Module, trains: bool, found: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 1), layer).train(trains)
    if isinstance(layer, nn.BatchNorm1d):  # frozen in a model that trains
        layer.eval()
    live.parts.add_model(model)
    train(model, torch.optim.Optimizer.zero_grad)
    assert causes(live) == found


def test_a_model_that_stays_in_eval_mode_after_a_validation(live: FakeLive) -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout())
    live.parts.add_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS + 2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).mean().backward()
        optimizer.step()
        if step == 1:
            model.eval()
    assert causes(live) == ["eval-mode"]


def test_an_input_optimized_by_a_model_in_eval_mode_is_no_finding(live: FakeLive) -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout()).eval()
    live.parts.add_model(model)
    image = torch.zeros(1, 3, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(image).pow(2).mean().backward()
        optimizer.step()
    assert causes(live) == []


def test_the_first_broken_loss_names_its_batch(live: FakeLive) -> None:
    inputs = torch.ones(20, 3)
    inputs[13] = math.nan
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(inputs), batch_size=4):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    found = live.observer.facts.non_finite
    assert found == NonFinite(step=4, batch=3, inputs=True, weights=False)


def test_weights_that_broke_in_the_update_before(live: FakeLive) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).mean()
        if step == 2:  # its value is finite, the gradient of sqrt at 0 is not
            loss = torch.sqrt(loss * 0.0)
        loss.backward()
        optimizer.step()
    assert live.observer.facts.non_finite == NonFinite(step=3, weights=True)


def test_a_batch_that_the_script_skips_leaves_the_next_loss_finite(live: FakeLive) -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, math.nan, 1.0):
        weight.grad = None
        (weight * factor).backward()
        if math.isfinite(factor):
            optimizer.step()
    assert live.values("train/loss") == pytest.approx([1.0, 0.9])


# --- findings of a record ----------------------------------------------------------------------


def broken(**changes: Any) -> LearningRecord:
    values: dict[str, Any] = {
        "step": 50,
        "count": 3,
        "steps": 100,
        "recovered": False,
        "before": np.array([0.9, 0.8, 0.85]),
        "norm_step": None,
        "clips": False,
    }
    return LearningRecord(steps=100, broken=LossBreak(**values | changes))


@pytest.mark.parametrize(
    ("record", "seen", "cause"),
    [
        (broken(), NonFinite(step=50, inputs=True, weights=False), "input"),
        (broken(before=np.array([1.0, 30.0, 5e3])), None, "diverged"),
        (broken(norm_step=49), None, "gradient"),
        (broken(), NonFinite(step=50, inputs=False, weights=True), "gradient"),
        (broken(), NonFinite(step=50, inputs=False, weights=False), None),
        (broken(), None, None),
    ],
)
def test_why_a_loss_is_not_finite(
    record: LearningRecord, seen: NonFinite | None, cause: str | None
) -> None:
    (found,) = learning_diagnoses(record, TrainingFacts(non_finite=seen), SCRIPT)
    assert (found.kind, found.cause) == ("loss-not-finite", cause)
    assert found.next is not None
    assert ("learning rate" in found.next.text) is (cause == "diverged")


def test_clipping_is_not_advised_where_it_is_in_use() -> None:
    grows = np.array([1.0, 30.0, 5e3])
    for clips in (False, True):
        (found,) = learning_diagnoses(broken(before=grows, clips=clips), None, SCRIPT)
        assert found.next is not None
        assert ("clip" in found.next.text) is not clips


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (LearningRecord(steps=0, skipped=300.0, scale=0.0), ["steps-skipped"]),
        (LearningRecord(steps=300, skipped=12.0, scale=1024.0), []),
        (LearningRecord(rates=(0.0,) * 20, zero_rate=0.3), ["learning-rate-zero"]),
        (LearningRecord(rates=(0.0,) * 20, zero_rate=0.1), []),  # the end of a schedule
        (LearningRecord(rates=(0.0,) * 19 + (1e-5,), zero_rate=0.3), []),
        (LearningRecord(steps=5, rates=(0.0,) * 5), []),  # a warm-up
    ],
)
def test_updates_that_change_nothing(record: LearningRecord, found: list[str]) -> None:
    assert [one.cause for one in learning_diagnoses(record, None, SCRIPT)] == found


def test_the_record_of_a_store(tmp_path: Path) -> None:
    losses = [1.0, 20.0, 400.0, math.nan, math.nan, 2.0]
    rows: list[Row] = [
        (float(step), step, {"train/loss": loss, "train/lr": 0.1})
        for step, loss in enumerate(losses, 1)
    ]
    folder = write_run(tmp_path / "run", steps=rows)
    writer = StoreWriter(folder / "rank0.sqlite", reopen=True)
    with writer.transaction():
        writer.add_event(Event(CREATED, 4, 0, "nan", "The loss is nan at step 4", {}))
    writer.close()
    with StoreReader(folder) as reader:
        record = read_learning(reader)
    assert record.broken is not None
    assert record.broken.before.tolist() == [1.0, 20.0, 400.0]
    assert (record.broken.count, record.broken.steps, record.broken.recovered) == (2, 6, True)
    assert record.rates == (0.1,) * 6
    assert record.zero_rate == 0
