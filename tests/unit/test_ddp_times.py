"""What is read of DistributedDataParallel's own log, and at which steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.sampling.ddp_times import FIRST, MOST_CUDA, DdpTimes, distance, seconds
from tests.unit.fake_live import FakeLive, hooked

DDP_KEYS = ("perf/forward_compute", "perf/backward_compute", "perf/comm_wait")


class Logged:
    """Stands for DDP and its logger: fair because it samples where the real one does."""

    def __init__(self, *, before: int = 0, on_cuda: bool = False) -> None:
        self.forwards = before
        self.rate = 100
        self.logger = self
        self.ints_map: dict[str, int] = {}
        self.is_cuda = on_cuda
        self.reads = 0

    def parameters(self) -> Iterator[Any]:
        yield self

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def _get_ddp_logging_data(self) -> Logged:
        self.reads += 1
        return self

    def forward(self) -> None:
        """As DDP does it: the iteration before is logged when the next one begins."""
        if self.forwards > 0 and (self.forwards <= 10 or self.forwards % self.rate == 0):
            self.ints_map = {"iteration": self.forwards, "backward_compute_time": self.forwards}
        self.forwards += 1


def sampled(module: Logged, steps: int, step_s: float, *, syncs: int = 1) -> dict[int, int]:
    """The iterations that were recorded, by the step whose row has them."""
    times = DdpTimes()
    times.meet(module)
    found = {}
    for step in range(1, steps + 1):
        for _ in range(syncs):
            module.forward()
        row: dict[str, Any] = {}
        times.add(row, step * step_s)
        if row:
            found[step] = round(row["perf/backward_compute"] * 1e9)
    return found


def test_every_step_is_read_where_steps_are_long() -> None:
    found = sampled(Logged(), 60, 0.1)
    assert list(found) == list(range(min(found), 61))
    assert all(iteration == step - 1 for step, iteration in found.items())


def test_short_steps_are_read_seldom_and_ranks_read_the_same_ones() -> None:
    module = Logged()
    one, other = sampled(module, 600, 0.005), sampled(Logged(before=3), 600, 0.004)
    assert module.rate == 8
    assert module.reads < 600 / 8 + FIRST
    assert {iteration % 8 for iteration in one.values()} == {0}
    late = {step: iteration for step, iteration in other.items() if step > 50}
    assert {iteration % 8 for iteration in late.values()} <= {0}
    assert len(set(one.values()) & set(other.values())) > 600 / 16 - 5


def test_two_forwards_a_step_are_read_too() -> None:
    found = sampled(Logged(), 100, 0.1, syncs=2)
    assert len(found) > 60


def test_on_cuda_samples_are_rare_because_ddp_waits_for_each() -> None:
    module = Logged(on_cuda=True)
    found = sampled(module, 1000, 0.002)
    assert module.rate == MOST_CUDA == distance(0.002, on_cuda=True)
    assert len(found) <= 1000 / MOST_CUDA + 1
    assert distance(2.0, on_cuda=True) == 16


def test_another_step_time_changes_the_distance() -> None:
    module, times = Logged(), DdpTimes()
    times.meet(module)
    now_s = 0.0
    for step in range(1000):
        now_s += 0.1 if step < 300 else 0.004
        module.forward()
        times.add({}, now_s)
    assert module.rate == 16


def test_a_module_that_is_gone_is_read_no_more() -> None:
    times, module = DdpTimes(), Logged()
    times.meet(module)
    del module
    row: dict[str, Any] = {}
    for step in range(100):
        times.add(row, float(step))
    assert row == {}


def test_what_ddp_does_not_know_is_missing() -> None:
    assert seconds({}) == {}
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
def group(tmp_path: Path) -> Iterator[None]:
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
    rows = [row for _, row in live.rows][1:]
    for row in rows:
        phases = [row[f"perf/{name}"] for name in ("forward", "backward", "optimizer")]
        assert all(value is not None and value > 0 for value in phases)
        step_time = row["perf/step_time"]
        assert step_time is not None
        assert sum(value or 0 for value in phases) <= step_time * (1 + 1e-9)
    told = [row for row in rows if "perf/comm_wait" in row]
    assert len(told) >= 2
    for row in told:
        assert all(row[key] is not None for key in DDP_KEYS)


def test_without_ddp_only_the_phases_are_there() -> None:
    live = train(FakeLive(world_size=2), 30, ddp=False)
    assert "perf/backward" in live.rows[-1][1]
    assert not any(key in row for _, row in live.rows for key in DDP_KEYS)


def test_a_process_by_itself_records_none_of_it(group: None) -> None:
    live = train(FakeLive(), 30, ddp=True)
    assert not any("perf/backward" in row or DDP_KEYS[1] in row for _, row in live.rows)


def test_another_torch_without_that_log_loses_only_its_metrics(
    group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate")
    live = train(FakeLive(world_size=2), 60, ddp=True)
    (record,) = caplog.records
    assert "perf/comm_wait will be missing" in record.message
    assert "perf/backward" in live.rows[-1][1]
