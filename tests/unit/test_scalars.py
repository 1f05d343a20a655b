"""The loss readers: rows in order and whole, nothing waits, a full ring drops values."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stepscope.run import RunStatus
from stepscope.store import cuda_readback
from stepscope.store.cuda_readback import CudaScalarReadback, MetricRow
from stepscope.store.recorder import Recorder
from tests.support.fake_copies import replace_copies
from tests.support.run_values import metric
from trainer.training.accelerator import HostReader


@dataclass
class FakeEvent:
    """A CUDA event that lands when told: order and completeness do not depend on the device."""

    landed: bool = False
    waited: bool = False

    def record(self) -> None:
        self.landed = False

    def query(self) -> bool:
        return self.landed

    def synchronize(self) -> None:
        self.landed = self.waited = True


class Rows(list[tuple[int, MetricRow]]):
    def __call__(self, step: int, ts: float, row: MetricRow) -> None:
        self.append((step, row))


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda _self: True)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: float) -> OnGpu:
        return torch.tensor(value).as_subclass(cls)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    made: list[FakeEvent] = []

    def make() -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    replace_copies(monkeypatch, make)
    return made


def put(reader: CudaScalarReadback | HostReader, step: int) -> None:
    loss = torch.nn.Parameter(torch.tensor([[float(step)]]))
    reader.put(step, 0.0, {"train/lr": 0.1}, {"train/loss": loss})


def row(step: int) -> tuple[int, MetricRow]:
    return step, {"train/lr": 0.1, "train/loss": float(step)}


def test_a_row_waits_for_its_copy_and_keeps_its_place(events: list[FakeEvent]) -> None:
    rows = Rows()
    put(HostReader(rows), 1)
    assert rows == [row(1)], "a CPU row is logged at once"
    rows.clear()
    reader = CudaScalarReadback(rows)
    put(reader, 1)
    put(reader, 2)
    events[1].landed = True
    reader.poll()
    assert rows == []
    events[0].landed = True
    reader.poll()
    assert rows == [row(1), row(2)]
    assert not any(event.waited for event in events)


def test_a_step_records_the_rows_whose_values_have_arrived(
    events: list[FakeEvent], tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, name="arrived")
    try:
        recorder.log_step({"train/loss": OnGpu(1.0)})
        assert recorder.needs_boundary, "the next row must not overtake this one"
        for event in events:
            event.landed = True
        recorder.log_step({"train/loss": OnGpu(2.0)})
        assert recorder.ring.last == 0, "the first row is in the ring, before the run ends"
        for event in events:
            event.landed = True
    finally:
        recorder.close(RunStatus.FINISHED)
    assert metric(tmp_path, "train/loss").tolist() == [1.0, 2.0]


def test_values_between_two_copies_to_the_host_travel_together(
    events: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_readback, "PERIOD_S", 3600.0)
    monkeypatch.setattr(cuda_readback, "CELLS", 4)
    rows = Rows()
    reader = CudaScalarReadback(rows)
    for step in range(1, 11):
        put(reader, step)
    assert len(events) == 3, "the first, and two of four rows each"
    reader.flush()
    assert rows == [row(step) for step in range(1, 11)]
    reader.put(11, 0.0, {}, {str(number): torch.tensor(1.0) for number in range(5)})
    reader.flush()
    assert rows[-1] == (11, {str(number): 1.0 for number in range(5)})


def test_a_failing_device_costs_values_and_no_row(
    events: list[FakeEvent], caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows()
    reader = CudaScalarReadback(rows)
    put(reader, 1)
    put(reader, 2)

    def lost() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    events[0].query = lost  # type: ignore[method-assign]
    reader.poll()
    assert rows == [(1, {"train/lr": 0.1}), (2, {"train/lr": 0.1})]
    assert len(caplog.records) == 1


def test_a_device_that_hangs_does_not_hang_the_end(events: list[FakeEvent]) -> None:
    rows = Rows()
    reader = CudaScalarReadback(rows)
    put(reader, 1)
    reader.flush(timeout_s=0.0)
    assert rows == [(1, {"train/lr": 0.1})]
    assert not events[0].waited


@pytest.mark.parametrize("name", ["_new_page", "_copy_to_host"])
def test_no_memory_for_the_values_costs_no_row(
    events: list[FakeEvent], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    rows = Rows()
    reader = CudaScalarReadback(rows)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_readback, name, refuse)
        put(reader, 1)
    put(reader, 2)
    reader.flush()
    assert rows == [(1, {"train/lr": 0.1}), row(2)]


def test_nothing_is_asked_of_the_device_while_a_graph_is_captured(
    events: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows()
    reader = CudaScalarReadback(rows)
    put(reader, 1)
    events[0].landed = True
    with monkeypatch.context() as patch:
        patch.setattr(cuda_readback, "_is_capturing", lambda: True)
        reader.poll()
        reader.flush()
        assert rows == []
    reader.poll()
    assert rows == [row(1)]


def test_what_the_sink_raises_reaches_the_caller(events: list[FakeEvent]) -> None:
    """The trainer's sink ends a run whose loss is NaN."""

    def refuse(step: int, ts: float, values: MetricRow) -> None:
        raise ArithmeticError("The loss is NaN")

    for handed_on_by in (CudaScalarReadback.poll, CudaScalarReadback.flush):
        reader = CudaScalarReadback(refuse)
        put(reader, 1)
        events[-1].landed = True
        with pytest.raises(ArithmeticError, match="The loss is NaN"):
            handed_on_by(reader)


def test_a_forked_child_frees_no_memory_of_the_device(
    events: list[FakeEvent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free it takes the allocator's lock, which a thread of the parent may hold for good."""
    recorder = Recorder(tmp_path, name="fork")
    monkeypatch.setattr(recorder._writer, "leave", lambda: None)  # its thread lives on here
    recorder.log_step({"train/loss": OnGpu(1.0)})
    reader = weakref.ref(recorder._readback)
    assert reader() is not None
    try:
        recorder.leave()  # what a child does first
        gc.collect()
        assert reader() is not None
    finally:
        recorder._writer.close(4.0)
