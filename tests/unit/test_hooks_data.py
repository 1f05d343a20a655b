"""The DataLoader under the hooks: waiting, samples, epochs, and what is evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.fake_live import FakeLive, hooked
from tests.support.fake_nvml import FakeClock

FETCH_S, TRAIN_S, EVALUATE_S = 1.0, 10.0, 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def live(clock: FakeClock) -> Iterator[FakeLive]:
    with hooked() as live:
        yield live


@dataclass
class Slow(Dataset[Tensor]):
    """Takes a second an item."""

    clock: FakeClock
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.clock.spend(FETCH_S)
        return torch.ones(3)


class Script:
    """A training script of which each test is a variation."""

    def __init__(self, clock: FakeClock, length: int = 5, batch: int = 2) -> None:
        self.clock = clock
        self.w = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.w], lr=0.1)
        self.loader = DataLoader(Slow(clock, length), batch_size=batch)
        self.validation = DataLoader(Slow(clock, length), batch_size=batch)

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        (batch * self.w).mean().backward()
        self.clock.spend(TRAIN_S)
        self.optimizer.step()

    def evaluate_without_gradients(self) -> None:
        with torch.no_grad():
            for batch in self.validation:
                (batch * self.w).mean()
                self.clock.spend(EVALUATE_S)

    def evaluate_with_gradients_off_inside(self) -> None:
        for batch in self.validation:
            with torch.no_grad():
                (batch * self.w).mean()
                self.clock.spend(EVALUATE_S)

    def evaluate_partly(self) -> None:
        with torch.no_grad():
            for _ in self.validation:
                self.clock.spend(EVALUATE_S)
                break


def test_waiting_samples_and_epoch_of_every_step(live: FakeLive, clock: FakeClock) -> None:
    script = Script(clock)
    for _ in range(2):
        for batch in script.loader:
            script.step(batch)
    assert live.values("perf/data_wait") == [2.0, 1.0, 2.0, 2.0, 1.0]
    assert live.values("perf/step_time") == [12.0, 11.0, 12.0, 12.0, 11.0]
    assert live.values("perf/samples_per_sec")[:2] == [2 / 12, 1 / 11]
    assert live.values("train/epoch") == [1.0] * 3 + [2.0] * 3
    assert live.recorder.epoch == 2
    assert live.recorder.events == [
        ("epoch", f"Epoch {number}: 3 batches, 35 s", {"seconds": 35.0, "batches": 3})
        for number in (1, 2)
    ]


@pytest.mark.parametrize("length", [4, 2], ids=["two batches", "one batch"])
@pytest.mark.parametrize(
    "evaluate", [Script.evaluate_without_gradients, Script.evaluate_with_gradients_off_inside]
)
def test_evaluation_is_no_step_time_wait_or_epoch(
    live: FakeLive, clock: FakeClock, evaluate: Callable[[Script], None], length: int
) -> None:
    script = Script(clock, length)
    evaluate(script)
    for _ in range(3):
        for batch in script.loader:
            script.step(batch)
        evaluate(script)
    steps = 3 * length // 2
    assert live.values("perf/step_time") == [12.0] * (steps - 1)
    assert live.values("perf/data_wait") == [2.0] * (steps - 1)
    assert live.values("perf/samples_per_sec") == [2 / 12] * (steps - 1)
    assert live.values("train/epoch") == [
        epoch for epoch in (1.0, 2.0, 3.0) for _ in range(length // 2)
    ]
    assert [kind for kind, _, _ in live.recorder.events] == ["epoch"] * 3


def test_evaluation_amid_an_epoch(live: FakeLive, clock: FakeClock) -> None:
    script = Script(clock, 8)
    for at, batch in enumerate(script.loader):
        script.step(batch)
        if at == 1:
            script.evaluate_with_gradients_off_inside()
            clock.spend(1000.0)  # writing a checkpoint
        if at == 2:
            script.evaluate_partly()
    assert live.values("perf/step_time") == [12.0] * 3
    assert live.values("perf/samples_per_sec") == [2 / 12] * 3
    assert live.values("train/epoch") == [1.0] * 4


def test_a_loader_inside_a_loader_is_waited_for_once(live: FakeLive, clock: FakeClock) -> None:
    class Outer(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from DataLoader(Slow(clock, 4), batch_size=2)

    script = Script(clock)
    for batch in DataLoader(Outer(), batch_size=None):
        script.step(batch)
    assert live.values("perf/data_wait") == [2.0]
    assert live.values("perf/samples_per_sec") == [2 / 12]
    assert live.values("train/epoch") == [], "such a stream may never end"


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"text": ["a", "b"], "ids": torch.zeros(4, 2)}, 4),
        (np.zeros((5, 2)), 5),
        ([torch.zeros(100), torch.zeros(90)], None),  # samples of different lengths
    ],
)
def test_the_samples_of_a_batch_are_its_tensors_common_length(
    live: FakeLive, clock: FakeClock, batch: Any, samples: int | None
) -> None:
    script = Script(clock)
    for _ in DataLoader([batch, batch], batch_size=None, collate_fn=lambda batch: batch):
        script.step(torch.ones(2, 3))
    assert live.values("perf/samples_per_sec") == ([samples / TRAIN_S] if samples else [])
    assert live.values("perf/data_wait") == [0.0]


@pytest.mark.parametrize("collate", [list, lambda rows: {"x": rows[0][0]}])
@pytest.mark.parametrize(("drop", "expected"), [(False, [4, 2, 4, 4, 2]), (True, [4, 4, 4])])
def test_the_samples_of_a_data_set_are_the_drawn_ones(
    live: FakeLive, clock: FakeClock, collate: Any, drop: bool, expected: list[int]
) -> None:
    script, rows = Script(clock), [(torch.zeros(3, 8), 0)] * 10
    loader: Any = DataLoader(rows, batch_size=4, shuffle=True, drop_last=drop, collate_fn=collate)
    for _ in range(2):
        for _ in loader:
            script.step(torch.ones(2, 3))
    assert live.values("perf/samples_per_sec") == [count / TRAIN_S for count in expected]
