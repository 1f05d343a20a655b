"""What fills the allocated memory, against the allocator itself; and the phases in a snapshot."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope.distributed.rendezvous import find_place
from stepscope.memory.model_states import ModelStateTracker
from stepscope.run import RunKind, RunStatus
from stepscope.session.script_session import ScriptSession
from stepscope.store import StoreReader
from tests.gpu.conftest import simulator_only
from tests.support.installed_hooks import installed

KEYS = ("memory/parameters", "memory/gradients", "memory/optimizer_state")
BLOCK = 512
"""The allocator rounds sizes up to this."""


class Scales(nn.Module):
    """Multiplies by weights: no library takes a workspace for it."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size, device="cuda") for size in sizes)

    def forward(self) -> torch.Tensor:
        return torch.stack([weights.square().sum() for weights in self.weights]).sum()


def rounded(*sizes: int) -> int:
    """Bytes of float32 tensors of these sizes as the allocator counts them."""
    return sum(-(-4 * size // BLOCK) * BLOCK for size in sizes)


def read(optimizer: torch.optim.Optimizer, *models: nn.Module) -> tuple[int, ...]:
    parts = ModelStateTracker()
    parts.add_optimizer(optimizer)
    for model in models:
        parts.add_model(model)
    values = parts.read(0)
    return tuple(int(values[key]) for key in KEYS)


@pytest.mark.parametrize("fused", [False, True])
def test_the_parts_are_what_the_allocator_holds(fused: bool) -> None:
    """A step's tensors are gone at the boundary: what is left is weights, gradients and state."""
    sizes = [1000, 4096, 300_000]
    whole = 4 * sum(sizes)
    before = torch.cuda.memory_allocated()
    model = Scales(sizes)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    model().backward()
    optimizer.step()
    # The count of steps is on the host, but for a fused optimizer.
    counts = 4 * len(sizes) if fused else 0
    assert read(optimizer) == (whole, whole, 2 * whole + counts)
    held = torch.cuda.memory_allocated() - before
    assert held == 4 * rounded(*sizes) + (len(sizes) * BLOCK if fused else 0)
    optimizer.zero_grad()
    assert read(optimizer) == (whole, 0, 2 * whole + counts)
    assert torch.cuda.memory_allocated() - before == held - rounded(*sizes)


def test_tied_and_frozen_weights_and_other_devices() -> None:
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)).cuda()
    model[1].weight = model[0].weight
    frozen, on_host = nn.Linear(64, 64).cuda().requires_grad_(False), nn.Linear(8, 8)
    optimizer = torch.optim.AdamW([*model.parameters(), *on_host.parameters()])
    tied = 100 * 16 * 4
    assert read(optimizer, model)[0] == tied
    assert read(optimizer, model, frozen)[0] == tied + 65 * 64 * 4
    for weights in model.parameters():
        weights.grad = torch.ones_like(weights)
    optimizer.step()
    assert read(optimizer, model) == (tied, tied, 2 * tied)


@simulator_only
def test_a_reading_makes_no_call_of_cuda() -> None:  # and so it waits for nothing
    import cudasim  # noqa: PLC0415 - where there is a simulator

    model = Scales([1000] * 50)
    optimizer = torch.optim.Adam(model.parameters())
    model().backward()
    optimizer.step()
    parts = ModelStateTracker()
    parts.add_optimizer(optimizer)
    parts.add_model(model)
    parts.search()
    torch.cuda.synchronize()
    with cudasim.counted() as calls:
        parts.find()
        assert parts.read(0)[KEYS[2]] >= 400_000
    assert {name: count for name, count in calls.items() if count} == {}


# --- recorded -------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ScriptSession]:
    live = ScriptSession(find_place(tmp_path, "parts", {}), name="parts", kind=RunKind.WATCH)
    with installed(live):
        yield live
    live.close(RunStatus.FINISHED)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    data = TensorDataset(torch.randn(steps * 8, 64), torch.randn(steps * 8, 1))
    for x, y in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()


# --- the phases -----------------------------------------------------------------------------------


def test_a_snapshot_tells_the_phase_of_each_allocation(live: ScriptSession) -> None:
    model = nn.Sequential(nn.Linear(64, 3000), nn.ReLU(), nn.Linear(3000, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer, 2)
    live.recorder._offer(1, "memory_snapshot", "{}")
    fit(model, torch.optim.SGD(model.parameters(), momentum=0.9), 4)
    live.close(RunStatus.FINISHED)
    with StoreReader(live.recorder.folder) as reader:
        [event] = [event for event in reader.events() if event.kind == "memory_snapshot"]
    snapshot = pickle.loads((live.recorder.folder / event.data["path"]).read_bytes())
    made = [
        (entry["user_metadata"], entry["size"])
        for trace in snapshot["device_traces"]
        for entry in trace
        if entry["action"] == "alloc"
    ]
    hidden, weights = 4 * 8 * 3000, 4 * 64 * 3000
    assert ("phase=forward", hidden) in made
    assert ("phase=backward", weights) in made, "a gradient, which a thread of autograd makes"
    assert {text for text, _ in made} == {"phase=forward", "phase=backward", "phase=optimizer"}
    assert torch.cuda.memory._get_memory_metadata() == ""
