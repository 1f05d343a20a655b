"""What is read of DistributedDataParallel's own log, and at which steps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.distributed.ddp_timing import (
    ADJUST_EVERY,
    LEAST_CUDA,
    MOST_CUDA,
    DdpTiming,
    distance,
    seconds,
)
from tests.support.fake_live import FakeLive, hooked

DDP_KEYS = ("perf/forward_compute", "perf/backward_compute", "perf/comm_wait")


class Logged:
    """Stands for DDP and its logger: fair because it samples where the real one does."""

    def __init__(self, *, on_cuda: bool = False) -> None:
        self.forwards = 0
        self.rate = 100
        self.logger = self
        self.ints_map: dict[str, int] = {}
        self.is_cuda = on_cuda

    def parameters(self) -> Iterator[Any]:
        yield self

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def _get_ddp_logging_data(self) -> Logged:
        return self

    def forward(self, count: int = 1) -> None:
        for _ in range(count):
            self._forward()

    def _forward(self) -> None:
        """As DDP does it: the iteration before is logged when the next one begins."""
        if self.forwards > 0 and (self.forwards <= 10 or self.forwards % self.rate == 0):
            self.ints_map = {"iteration": self.forwards, "backward_comm_time": self.forwards}
        self.forwards += 1


def sampled(
    module: Logged, steps: int, step_s: float, *, forwards: Callable[[int], int] = lambda step: 1
) -> dict[int, int]:
    """The iterations that were recorded, by the step whose row has them."""
    times = DdpTiming()
    times.attach(module)
    found = {}
    for step in range(1, steps + 1):
        module.forward(forwards(step))
        if row := added(times, step * step_s):
            found[step] = round(row["perf/ddp_iteration"])
            assert round(row["perf/comm_wait"] * 1e9) == found[step]
    return found


def added(times: DdpTiming, now_s: float) -> dict[str, Any]:
    """Return the metrics of a step that ends now."""
    row: dict[str, Any] = {}
    times.add(row, now_s)
    return row


@pytest.mark.parametrize(
    ("step_s", "on_cuda", "every"),
    [
        (0.0002, False, 243),
        (0.1, False, 1),
        (0.0002, True, MOST_CUDA),
        (0.1, True, LEAST_CUDA),
    ],
)
def test_a_sample_never_drifts_from_its_step(step_s: float, on_cuda: bool, every: int) -> None:
    """Whatever the distance, and where a forward pass had no step before."""
    assert distance(step_s, on_cuda=on_cuda) == every
    for ahead in (0, 1, 7):
        module = Logged(on_cuda=on_cuda)
        module.forward(ahead)
        found = sampled(module, 4000, step_s)
        assert {step + ahead - iteration for step, iteration in found.items()} == {1}, ahead
        assert {iteration % every for iteration in found.values()} == {0}, ahead
        assert len(found) >= 4000 / every - 4000 / ADJUST_EVERY - 10, ahead


def test_waits_of_two_models_are_not_recorded() -> None:
    times, first, second = DdpTiming(), Logged(), Logged()
    times.attach(first)

    def last(steps: range, *modules: Logged) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for step in steps:
            for module in modules:
                module.forward()
            row = added(times, step * 0.1)
        return row

    assert "perf/comm_wait" in last(range(1, 600), first)
    times.attach(second)
    assert last(range(600, 700), first, second) == {"perf/ddp_models": 2.0}
    del first
    gc.collect()
    assert "perf/comm_wait" in last(range(700, 1300), second)


def test_what_ddp_does_not_know_is_missing() -> None:
    assert seconds({"backward_compute_time": 0, "backward_comm_time": 0}) == {}
    told = {
        "forward_compute_time": 1_000_000,
        "backward_compute_time": 5_000_000,
        "backward_comm_time": 4_000_000,
        "backward_compute_comm_overlap_time": 1_500_000,
    }
    assert seconds(told) == pytest.approx(
        {"perf/forward_compute": 0.001, "perf/backward_compute": 0.005, "perf/comm_wait": 0.0025}
    )


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it for good
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(live: FakeLive, steps: int, *, ddp: bool) -> FakeLive:
    with hooked(live):
        bare = nn.Linear(4, 1)
        model = DistributedDataParallel(bare) if ddp else bare
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return live


def test_a_watched_job_has_its_phases_and_what_its_ddp_knows(group: None) -> None:
    live = train(FakeLive(world_size=2), 600, ddp=True)
    alone = train(FakeLive(), 30, ddp=True)
    assert all("perf/backward" in row and DDP_KEYS[1] not in row for _, row in alone.rows)
    first, *rows = [row for _, row in live.rows]
    assert all(sum(key in row for row in rows) >= 2 for key in DDP_KEYS)
    assert first["perf/forward"] is None, "its begin is unknown without a DataLoader"
    assert first["perf/backward"]
    for row in rows:
        phases = [row[f"perf/{name}"] for name in ("forward", "backward", "optimizer")]
        assert all(value is not None and value > 0 for value in phases)
        step_time = row["perf/step_time"]
        assert step_time is not None
        assert sum(value or 0 for value in phases) <= step_time * (1 + 1e-9)
