"""Steps by hand on a GPU: the run is announced there, and its copies are timed once."""

from __future__ import annotations

import pytest
import torch

from stepscope.watch.hooks.state import HELD
from tests.support.fake_live import hooked


@pytest.mark.parametrize("as_list", [False, True])
def test_the_device_is_that_of_the_loss(as_list: bool) -> None:
    w = torch.nn.Parameter(torch.ones(3, device="cuda"))
    with hooked() as live:
        for _ in range(HELD):
            loss = w.square().sum()
            torch.autograd.backward([loss] if as_list else loss)
    assert live.devices == [0]


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_copies_are_timed_once_where_an_optimizer_follows(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudasim = pytest.importorskip("cudasim", reason="only the simulator counts its calls")
    monkeypatch.setattr("stepscope.watch.hooks.h2d_copies.LEAST_S", 0.0)  # each step is measured
    with hooked() as live:
        w = torch.nn.Parameter(torch.ones(3, device=first))
        for _ in range(HELD):
            w.square().sum().backward()
        w = torch.nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.SGD([w], lr=0.1)
        w.square().sum().backward()
        optimizer.step()
        with cudasim.counted() as calls:
            torch.ones(3).to("cuda")
    assert live.devices == ([0] if first == "cuda" else [None, 0])
    assert sum(number for name, number in calls.items() if "EventRecord" in name) == 2
