"""Bytes of parameters, gradients and optimizer state, of models whose sizes are known."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.sampling import owners, parts
from stepscope.sampling.allocator import Readings
from stepscope.sampling.parts import EVERY_S, REST, UNCHANGED_S, Parts
from stepscope.sampling.tensors import Storages, optimizer_state
from tests.unit.fake_nvml import FakeClock

FLOAT = 4


def measured(*optimizers: Any, models: tuple[nn.Module, ...] = ()) -> tuple[float, ...]:
    """Parameters, gradients and optimizer state in the host's memory."""
    found = Parts()
    for optimizer in optimizers:
        found.add_optimizer(optimizer)
    for model in models:
        found.add_model(model)
    values = found.read(None)
    assert found.reason is None
    return tuple(values.values())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()


def total(model: nn.Module) -> int:
    return sum(weights.numel() for weights in model.parameters()) * FLOAT


def test_adam_keeps_two_moments_and_a_count_of_each_weight() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    optimizer = torch.optim.Adam(model.parameters())
    assert measured(optimizer) == (total(model), 0, 0)
    train(model, optimizer, torch.ones(3, 10))
    steps = len(list(model.parameters())) * FLOAT
    assert measured(optimizer) == (total(model), total(model), 2 * total(model) + steps)
    optimizer.zero_grad()
    assert measured(optimizer)[1] == 0


def test_tied_weights_count_once_and_frozen_ones_with_their_model() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(50, 50))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].weight, model[1].weight.T.data])
    tied, frozen = 50 * 8 * FLOAT, 51 * 50 * FLOAT
    assert measured(optimizer)[0] == tied
    assert measured(optimizer, models=(model,))[0] == tied + frozen


def test_a_view_holds_its_whole_storage_once() -> None:
    flat = torch.zeros(100)
    weights = [nn.Parameter(flat[:10]), nn.Parameter(flat[10:40])]
    optimizer = torch.optim.SGD(weights, momentum=0.9)
    bucket = torch.ones(64)
    weights[0].grad, weights[1].grad = bucket[:10], bucket[10:40]
    assert measured(optimizer) == (400, 256, 0)
    optimizer.step()
    assert measured(optimizer)[2] == 40 * FLOAT


def test_a_state_that_is_the_weights_themselves_counts_as_weights() -> None:
    weights = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([weights])
    optimizer.state[weights] = {"master": weights.data, "average": torch.zeros(10)}
    assert measured(optimizer) == (40, 0, 40)


def test_gradients_of_weights_that_no_optimizer_updates_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters())
    train(model, optimizer, torch.ones(2, 4))
    assert measured(optimizer, models=(model,))[1] == total(model)


def test_what_has_no_memory_here_is_left_out() -> None:
    meta = nn.Linear(1000, 1000, device="meta")
    lazy = nn.LazyLinear(5)
    here = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*meta.parameters(), *here.parameters()])
    assert measured(optimizer, models=(meta, lazy, here))[0] == total(here)
    elsewhere = Parts()
    elsewhere.add_optimizer(optimizer)
    assert elsewhere.read(0) == {}, "nothing on that device: missing, not zero"


def test_sparse_gradients_count_by_their_parts() -> None:
    model = nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([3, 7, 7])).sum().backward()
    indices, values = 3 * 8, 3 * 8 * FLOAT
    assert measured(optimizer)[1] == indices + values
    with warnings.catch_warnings():  # torch says that they are in beta state
        warnings.simplefilter("ignore", UserWarning)
        csr = torch.eye(4).to_sparse_csr()
    storages = Storages(None)
    storages.add([csr])
    csr_parts = csr.crow_indices(), csr.col_indices(), csr.values()
    assert storages.bytes == sum(part.untyped_storage().nbytes() for part in csr_parts)
    assert storages.bytes >= (5 + 4) * 8 + 4 * FLOAT


class Wrapper(torch.Tensor):
    """A tensor that consists of another one, as a DTensor does of its rank's part."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (1000, 1000))  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"asked for {func}")


def test_of_a_wrapper_the_tensors_within_count() -> None:
    storages = Storages(None)
    storages.add([Wrapper(torch.zeros(10)), Wrapper(torch.zeros(20))])
    assert storages.bytes == 30 * FLOAT


def test_state_in_lists_and_dicts_counts() -> None:
    weights = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.LBFGS([weights], history_size=3)
    for _ in range(4):
        optimizer.step(lambda: ((weights - 1) ** 2).sum().backward() or torch.zeros(()))  # type: ignore[func-returns-value]
    kept = {one.untyped_storage()._cdata: one.nbytes for one in optimizer_state([optimizer])}
    assert len(kept) >= 2
    assert measured(optimizer)[2] >= sum(kept.values())


def test_nothing_is_kept_alive() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    found = Parts()
    found.add_optimizer(optimizer)
    found.add_model(model)
    assert found.read(None)
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert found.reason == "no optimizer of torch was seen"
    assert found.read(None) == {}


def test_the_mode_of_a_model_is_that_of_the_last_boundary() -> None:
    model, stranger, found = nn.Linear(2, 2), nn.Linear(2, 2), Parts()
    found.add_model(model)
    assert found.mode_at_steps(model) is None
    found.find()
    model.eval()  # a validation after that step
    assert found.mode_at_steps(model) is True
    found.find()
    assert found.mode_at_steps(model) is False
    assert found.mode_at_steps(stranger) is None


def test_an_optimizer_that_raises_ends_it_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.optim.SGD):
        @property
        def state(self) -> Any:
            raise RuntimeError("not now")

        @state.setter
        def state(self, value: Any) -> None:
            pass

    found = Parts()
    optimizer = Odd([nn.Parameter(torch.zeros(3))])
    found.add_optimizer(optimizer)
    assert found.read(None) == {}
    assert found.reason == "RuntimeError: not now"
    assert not found.is_due(1e9)
    assert "not measured any more" in caplog.text


# --- how often ------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_reading_is_due_once_a_second(clock: FakeClock) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    found = Parts(clock=clock)
    assert not found.is_due(clock.now)
    found.add_optimizer(optimizer)
    assert found.is_due(clock.now)
    found.read(None)
    assert not found.is_due(clock.now + 0.99 * EVERY_S)
    assert found.is_due(clock.now + EVERY_S)


def test_a_reading_that_takes_long_is_followed_by_a_rest(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(weights: Any) -> Any:
        clock.now += 0.01
        return iter(())

    monkeypatch.setattr(parts, "gradients", slow)
    found = Parts(clock=clock)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    found.add_optimizer(optimizer)
    found.read(None)
    assert not found.is_due(clock.now + 0.9 * REST * 0.02)
    assert found.is_due(clock.now + REST * 0.02)


def test_what_does_not_change_is_asked_ever_more_seldom(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    state = parts.optimizer_state

    def noted(optimizers: Any) -> Any:
        asked.append(clock.now)
        return state(optimizers)

    monkeypatch.setattr(parts, "optimizer_state", noted)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    found = Parts(clock=clock)
    found.add_optimizer(optimizer)
    for _ in range(600):
        found.read(None)
        clock.now += 1.0
    assert 5 <= len(asked) <= 6 + 600 / UNCHANGED_S
    train(model, optimizer, torch.ones(1, 3))
    before = len(asked)
    assert found.read(None)["memory/optimizer_state"] > 2 * total(model)
    assert len(asked) == before + 1, "a state that was just made is seen at once"


def test_a_model_that_moves_is_measured_again(clock: FakeClock) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    found = Parts(clock=clock)
    found.add_optimizer(optimizer)
    assert found.read(None)["memory/parameters"] == total(model)
    model.double()
    assert found.read(None)["memory/parameters"] == 2 * total(model)
    assert found.read(0) == {}


# --- found by itself ------------------------------------------------------------------------------


def test_optimizers_and_models_are_found(clock: FakeClock) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    optimizer = torch.optim.AdamW(model[0].parameters())
    optimizers, models = owners.search()
    assert any(one is optimizer for one in optimizers)
    assert any(one is model for one in models)
    assert not any(one is model[0] or one is model[1] for one in models)
    found = Parts(clock=clock)
    found.search()
    assert found.is_due(clock.now)
    found.find()
    assert found.reason is None
    assert found.read(None)["memory/parameters"] >= total(model)


def test_it_searches_again_after_a_rest(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def search() -> tuple[list[Any], list[Any]]:
        searches.append(clock.now)
        clock.now += 0.1
        return [], []

    monkeypatch.setattr(owners, "search", search)
    found = Parts(clock=clock)
    assert found.find() == 0.0, "nobody asked for it"
    found.search()
    assert found.find() == pytest.approx(0.1)
    assert found.find() == 0.0
    clock.now += 0.11 * REST
    assert found.find() == pytest.approx(0.1)
    assert len(searches) == 2


def test_a_search_that_fails_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[list[Any], list[Any]]:
        raise TypeError("an odd class")

    monkeypatch.setattr(owners, "search", fail)
    found = Parts()
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
    found.add_optimizer(optimizer)
    found.search()
    assert found.find() == 0.0
    assert found.read(None)["memory/parameters"] == 48


# --- with the counters of the same boundary -------------------------------------------------------


def test_a_boundary_on_a_cpu_reads_the_process_with_them(clock: FakeClock) -> None:
    sizes = iter([100.0, 200.0])
    readings = Readings(None, clock=clock, resident=lambda: next(sizes))
    assert readings.take() == {}
    assert not readings.wanted
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
    readings.parts.add_optimizer(optimizer)
    assert readings.take() == {}
    assert readings.wanted
    readings.serve()
    assert not readings.wanted
    assert readings.take() == {
        "memory/parameters": 48.0,
        "memory/gradients": 0.0,
        "memory/optimizer_state": 0.0,
        "process/rss": 100.0,
    }
    assert readings.take() == {}, "each reading is recorded once"
    clock.now += EVERY_S
    readings.take()
    readings.serve()
    assert readings.take()["process/rss"] == 200.0


def test_on_a_gpu_they_come_with_the_counters_of_their_boundary(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"memory/allocated": 1.0}
    monkeypatch.setattr("stepscope.sampling.allocator.read", lambda index: dict(counters))
    readings = Readings(0, clock=clock)
    values = {"memory/parameters": 3.0}
    monkeypatch.setattr(readings.parts, "is_due", lambda now: True)
    monkeypatch.setattr(readings.parts, "read", lambda index: dict(values))
    readings.take()
    readings.serve()
    counters["memory/allocated"] = 2.0
    assert readings.take() == {"memory/allocated": 1.0, "memory/parameters": 3.0}
    assert readings.take() == {"memory/allocated": 1.0}
    clock.now += 10.0  # a long step, inside which the sampler reads
    assert readings.take() == {"memory/allocated": 2.0}
