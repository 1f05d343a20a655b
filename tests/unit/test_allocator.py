"""The allocator's counters, read only after CUDA has started; and its settings in force."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.memory import allocator
from stepscope.memory.allocator import NO_SPLIT, VARIABLES, split_reason

# The layout of torch 2.13's memory_stats_as_nested_dict, cut to what is read and its neighbors.
STATS: dict[str, Any] = {
    "allocated_bytes": {"all": {"current": 10, "peak": 30}, "large_pool": {"current": 7}},
    "reserved_bytes": {"all": {"current": 40, "peak": 60}},
    "active_bytes": {"all": {"current": 12, "peak": 31}},
    "inactive_split_bytes": {"all": {"current": 0, "peak": 9}},
    "num_alloc_retries": 1,
    "num_ooms": 0,
}


class FakeCuda:
    def __init__(self, stats: dict[str, Any], *, started: bool = True) -> None:
        self.stats = stats
        self.is_initialized = lambda: started
        self.asked: list[int] = []

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        self.asked.append(device)
        return self.stats


def use(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_one_call_gives_every_counter_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = use(monkeypatch, FakeCuda(STATS))
    values = {
        "memory/allocated": 10.0,
        "memory/reserved": 40.0,
        "memory/peak_allocated": 30.0,
        "memory/peak_reserved": 60.0,
        "memory/active": 12.0,
        "memory/inactive_split": 0.0,
        "memory/alloc_retries": 1.0,
        "memory/ooms": 0.0,
    }
    assert allocator.read(3) == values
    assert cuda.asked == [3]
    assert allocator.reason() is None
    use(monkeypatch, FakeCuda({"allocated_bytes": {"all": {"current": 5}}}))
    assert allocator.read(0) == {"memory/allocated": 5.0}  # a counter that torch lacks is missing


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (None, "torch is not imported in this process"),
        (SimpleNamespace(cuda=SimpleNamespace()), "torch is still being imported"),
        (
            SimpleNamespace(cuda=FakeCuda(STATS, started=False)),
            "CUDA has not been started in this process",
        ),
    ],
)
def test_cuda_is_never_started(
    monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace | None, reason: str
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if torch is not None:
        monkeypatch.setitem(sys.modules, "torch", torch)
    assert (allocator.read(0), allocator.reason()) == ({}, reason)
    assert ("torch" in sys.modules) is (torch is not None)
    assert not (hasattr(torch, "cuda") and getattr(torch.cuda, "asked", []))


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "program", "reason"),
    [
        ("", "", None),
        ("max_split_size_mb:64,expandable_segments:true", None, NO_SPLIT),
        ("expandable_segments:True", "expandable_segments:False", None),
        ("", "expandable_segments:True", NO_SPLIT),
    ],
)
@pytest.mark.parametrize("variable", VARIABLES)
def test_expandable_segments_have_no_count_of_their_split(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    environment: str,
    program: str | None,
    reason: str | None,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, environment)
    native = SimpleNamespace()  # of a torch that cannot tell
    if program is not None:
        native._accelerator_getAllocatorSettings = lambda: program
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=native))
    assert split_reason() == reason
    allocator._omits_split.cache_clear()
    use(monkeypatch, FakeCuda(STATS))
    sys.modules["torch"]._C = native  # type: ignore[attr-defined]
    assert ("memory/inactive_split" in allocator.read(0)) is (reason is None)
    allocator._omits_split.cache_clear()
