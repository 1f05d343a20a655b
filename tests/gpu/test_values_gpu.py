"""Asynchronous readback: no value is lost to the script's modes, or to a loop far ahead.

Later changes of a tensor do not change the value of a step. The simulator counts the copies to the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.run import RunStatus
from stepscope.store import cuda_readback
from stepscope.store.cuda_readback import CELLS, CudaScalarReadback, MetricRow
from stepscope.store.recorder import Recorder
from tests.gpu.conftest import simulator_only
from tests.support.run_values import metric, run_json

STEPS = 40
AHEAD = 800
LATE_CYCLES = 200_000_000  # some 100 ms at 2 GHz


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, name="values")
    yield recorder
    recorder.close(RunStatus.FINISHED)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("mode", [default_device, torch.inference_mode])
def test_a_mode_of_the_script_loses_no_value(
    recorder: Recorder, mode: type[AbstractContextManager[None]]
) -> None:
    losses = torch.arange(STEPS, device="cuda", dtype=torch.float32).unbind()
    with mode():
        recorder.log_step({"train/loss": losses[0]})
    with mode() if mode is default_device else torch.enable_grad():
        for loss in losses[1:]:
            recorder.log_step({"train/loss": loss})
    recorder.close(RunStatus.FINISHED)
    assert metric(recorder.folder, "train/loss").tolist() == list(range(STEPS))


def test_a_loop_far_ahead_of_the_device_loses_no_value(recorder: Recorder) -> None:
    losses = torch.arange(AHEAD, device="cuda", dtype=torch.float32).unbind()
    recorder.log_step({"train/loss": losses[0]})  # the first makes the memory, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE_CYCLES)
    for loss in losses[1:]:
        recorder.log_step({"train/loss": loss})
    recorder.close(RunStatus.FINISHED)
    assert metric(recorder.folder, "train/loss").tolist() == list(range(AHEAD))
    assert run_json(recorder.folder)["dropped"] == 0


@dataclass
class Clock:
    """Stands for the module `time` in `scalars`."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1e3)
    monkeypatch.setattr(cuda_readback, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Reader(CudaScalarReadback):
    """Keeps the rows that arrive."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, MetricRow]] = []
        super().__init__(lambda step, _ts, row: self.rows.append((step, row)))

    def log(self, step: int, value: Tensor) -> None:
        self.poll()
        self.put(step, 0.0, {}, {"train/loss": value})


def numbers(count: int) -> list[Tensor]:
    return list(torch.arange(count, device="cuda", dtype=torch.float32).unbind())


@simulator_only
@pytest.mark.parametrize(("step_s", "most"), [(0.001, 101), (0.1, 1000), (0.0, 2 + 2000 // CELLS)])
def test_copies_to_the_host_are_limited_by_time_and_not_by_steps(
    recorder: Recorder, clock: Clock, step_s: float, most: int
) -> None:
    import cudasim  # noqa: PLC0415 - where there is a simulator

    losses = numbers(1000)
    recorder.log_step({"train/loss": losses[0], "train/grad_norm": losses[0]})
    recorder.settle()
    clock.now += 1.0
    with cudasim.counted() as calls:
        for loss in losses:
            recorder.log_step({"train/loss": loss, "train/grad_norm": loss})
            clock.now += step_s
        recorder.settle()
    assert 0 < calls["copy d2h"] <= most
    # torch 2.6 records events by the older call, and one more before it frees pinned memory.
    recorded = calls.get("cudaEventRecordWithFlags") or calls["cudaEventRecord"]
    assert recorded <= 2 * calls["copy d2h"]
    recorder.close(RunStatus.FINISHED)
    assert metric(recorder.folder, "train/loss").tolist() == [0.0, *range(1000)]


def in_place() -> Callable[[int], Tensor]:
    loss = torch.zeros((), device="cuda")
    return lambda step: loss.fill_(step)


def raw_data() -> Callable[[int], Tensor]:
    loss = torch.zeros(1, device="cuda", requires_grad=True)
    value = torch.zeros(1, device="cuda")

    def step(step: int) -> Tensor:
        loss.data.copy_(value.fill_(step))
        return loss

    return step


def replay() -> Callable[[int], Tensor]:
    loss, graph = torch.full((), -1.0, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss += 1

    def step(_step: int) -> Tensor:
        graph.replay()
        return loss

    return step


def two_streams() -> Callable[[int], Tensor]:
    side, loss = torch.cuda.Stream(), torch.zeros((), device="cuda")
    torch.cuda.synchronize()

    def step(step: int) -> Tensor:
        torch.cuda.set_stream(side if step % 2 else torch.cuda.default_stream())
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream() if step % 2 else side)
        return loss.fill_(step)

    return step


@pytest.mark.parametrize("changed", [in_place, raw_data, replay, two_streams])
def test_what_changes_a_tensor_after_its_step_does_not_change_its_value(
    recorder: Recorder, changed: Callable[[], Callable[[int], Tensor]]
) -> None:
    step = changed()
    try:
        recorder.log_step({"train/loss": step(0)})
        torch.cuda._sleep(LATE_CYCLES)
        for number in range(1, STEPS):
            recorder.log_step({"train/loss": step(number)})
        step(STEPS)
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    recorder.close(RunStatus.FINISHED)
    assert metric(recorder.folder, "train/loss").tolist() == list(range(STEPS))


def test_each_type_arrives_as_the_number_that_it_holds(clock: Clock) -> None:
    exact = 2**24 + 1  # the first whole number that float32 cannot hold
    values: dict[str, tuple[Any, torch.dtype]] = {
        "int64": (exact, torch.int64),
        "float64": (float(exact), torch.float64),
        "float32": (0.1, torch.float32),
        "float16": (0.1, torch.float16),
        "bfloat16": (0.1, torch.bfloat16),
        "bool": (True, torch.bool),
    }
    row = {
        key: torch.tensor(value, dtype=kind, device="cuda") for key, (value, kind) in values.items()
    }
    row["one element"] = torch.tensor([[2.5]], device="cuda", requires_grad=True)
    row["parameter"] = nn.Parameter(torch.tensor([3.5], device="cuda"))
    expected = {key: float(value.item()) for key, value in row.items()}
    reader = Reader()
    reader.put(0, 0.0, {}, row)
    reader.put(1, 0.0, {}, row)
    reader.flush()
    assert reader.rows == [(0, expected), (1, expected)]


def test_nothing_that_is_gathered_enters_a_graph(clock: Clock) -> None:
    reader, losses = Reader(), numbers(4)
    reader.log(0, losses[0])
    reader.log(1, losses[1])  # not due
    clock.now += cuda_readback.PERIOD_S
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reader.log(2, losses[2] + 1)
        reader.flush()
    reader.log(3, losses[3])
    reader.flush()
    wanted = [{"train/loss": 0.0}, {"train/loss": 1.0}, {}, {"train/loss": 3.0}]
    assert [row for _, row in reader.rows] == wanted
