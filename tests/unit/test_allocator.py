"""Allocator counters are read from a torch that is there and has started CUDA, else not at all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.memory import allocator
from stepscope.metrics import METRICS

# The layout of torch 2.13's memory_stats_as_nested_dict, cut to what is read and its neighbors.
STATS: dict[str, Any] = {
    "allocated_bytes": {
        "all": {"current": 10, "peak": 30, "allocated": 99, "freed": 89},
        "large_pool": {"current": 7, "peak": 20, "allocated": 50, "freed": 43},
    },
    "reserved_bytes": {"all": {"current": 40, "peak": 60, "allocated": 60, "freed": 20}},
    "active_bytes": {"all": {"current": 12, "peak": 31, "allocated": 99, "freed": 87}},
    "inactive_split_bytes": {"all": {"current": 0, "peak": 9, "allocated": 9, "freed": 9}},
    "num_alloc_retries": 1,
    "num_ooms": 0,
}


class FakeCuda:
    def __init__(self, stats: dict[str, Any], *, started: bool = True) -> None:
        self.stats = stats
        self.started = started
        self.asked: list[int] = []

    def is_initialized(self) -> bool:
        return self.started

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        self.asked.append(device)
        return self.stats


def use(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_one_call_gives_every_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = use(monkeypatch, FakeCuda(STATS))
    assert allocator.read(3) == {
        "memory/allocated": 10.0,
        "memory/reserved": 40.0,
        "memory/peak_allocated": 30.0,
        "memory/peak_reserved": 60.0,
        "memory/active": 12.0,
        "memory/inactive_split": 0.0,
        "memory/alloc_retries": 1.0,
        "memory/ooms": 0.0,
    }
    assert cuda.asked == [3]
    assert allocator.reason() is None


def test_it_covers_the_memory_metrics_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCuda(STATS))
    of_the_allocator = {m.key for m in METRICS if m.source.startswith("torch.cuda.memory_stats")}
    assert set(allocator.read(0)) == of_the_allocator


def test_a_counter_that_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCuda({"allocated_bytes": {"all": {"current": 5}}}))
    assert allocator.read(0) == {"memory/allocated": 5.0}


def test_cuda_is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = use(monkeypatch, FakeCuda(STATS, started=False))
    assert allocator.read(0) == {}
    assert allocator.reason() == "CUDA has not been started in this process"
    assert cuda.asked == []


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert allocator.read(0) == {}
    assert allocator.reason() == "torch is not imported in this process"
    assert "torch" not in sys.modules


@pytest.mark.parametrize("half", [SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())])
def test_a_torch_still_being_imported(
    monkeypatch: pytest.MonkeyPatch, half: SimpleNamespace
) -> None:
    monkeypatch.setitem(sys.modules, "torch", half)
    assert allocator.read(0) == {}
    assert allocator.reason() == "torch is still being imported"
