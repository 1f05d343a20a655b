"""Optimizers and models are found by a search that leaves other threads alone."""

from __future__ import annotations

import sys
import threading

import torch

from stepscope.memory import model_states
from stepscope.memory.model_states import StorageBytes


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)


def test_each_storage_counts_once_where_it_is() -> None:
    tensor = torch.ones(10)
    weights = StorageBytes(None)
    weights.add([tensor, tensor.view(2, 5), torch.empty(7, device="meta")])
    state = StorageBytes(None, weights)
    state.add([tensor, torch.ones(3), torch.eye(4).to_sparse()])
    assert (weights.bytes, state.bytes) == (40, 12 + 4 * (2 * 8 + 4))


def test_finds_made_optimizers_and_all_modules() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unmade = torch.optim.SGD.__new__(torch.optim.SGD)
    optimizers, models = model_states.search()
    assert any(one is optimizer for one in optimizers)
    assert not any(one is unmade for one in optimizers)
    assert any(one is model for one in models)
    assert any(one is model.inner for one in models)


def test_a_tuple_that_another_thread_builds_is_not_held() -> None:
    """CPython raises SystemError where a tuple under construction has a second reference."""
    model = Model()
    errors: list[SystemError] = []
    done = threading.Event()

    def build() -> None:
        while not done.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=build) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(3):
            assert any(one is model for one in model_states.search()[1])
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors


class Wrapper:
    """As a DTensor: a tensor and the mesh of its devices."""

    def __init__(self) -> None:
        self.local, self.mesh = torch.zeros(4), object()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local", "mesh"], None


def test_a_wrapper_has_the_bytes_of_its_tensors() -> None:
    counted = model_states.StorageBytes(None)
    counted.add([Wrapper()])
    assert counted.bytes == 16
