"""What is captured at a failed allocation: the message, the stack, the segments, the counts."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.gpu.process_memory import HIDDEN
from stepscope.memory.growth import GrowthTrend
from stepscope.memory.oom import capture
from stepscope.memory.oom import observer as oom_watch
from stepscope.memory.oom.capture import requested_bytes
from stepscope.memory.oom.observer import OomObserver
from stepscope.memory.oom.record import (
    OomRecord,
    OomReport,
    read_report,
)
from stepscope.run.status import outcome
from tests.support.fake_nvml import FakeGpu, FakeNvml, FakeProcess, install
from tests.support.fake_recorder import FakeRecorder

GIB = 2**30
MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 2.00 GiB."


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (MESSAGE, 3 * GIB // 2),
        ("DefaultCPUAllocator: you tried to allocate 640 bytes.", 640),
        (f"tried to allocate {'9' * 20} TiB", 2**62),
        ("KeyError: 'x'", None),
    ],
)
def test_the_requested_size_in_a_message_is_read(message: str, size: int | None) -> None:
    assert requested_bytes(message) == size


# --- the stack ------------------------------------------------------------------------------------


def here() -> OomRecord:
    """Return the stack of the caller as it is recorded."""
    record = OomRecord(ts=0.0)
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(0))]
    capture.read_stack(record, frames)
    return record


class Probe(nn.Module):
    """Calls something within its forward pass."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, inputs: torch.Tensor, mask: Any = None) -> torch.Tensor:
        self.found = self.call()
        return inputs


def test_a_forward_pass_is_known() -> None:
    model = nn.Sequential(Probe(here))
    model(torch.zeros(8, 3))
    place = model[0].found
    assert place.phase == "forward"
    assert any("test_oom_capture.py" in frame for frame in place.stack)


def test_a_backward_pass_is_known_also_where_it_computes_forward_again() -> None:
    found: list[OomRecord] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            probe = Probe(here)
            probe(gradient)
            found.append(probe.found)
            return gradient

    Twice.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert found[0].phase == "backward"


def test_a_thread_that_python_did_not_begin_shows_the_stack_that_waits_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "_is_python_thread", lambda: False)
    assert here().phase == "backward"


# --- the device -----------------------------------------------------------------------------------


# --- the watch ------------------------------------------------------------------------------------


class FakeSource:
    """A CUDA build of torch as far as the capture reads it."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.observers: list[Callable[..., None]] = []
        stats = {
            "allocated_bytes": {"all": {"current": 900, "peak": 950}},
            "reserved_bytes": {"all": {"current": 1000, "peak": 1000}},
        }
        self.cuda = types.SimpleNamespace(
            _lazy_call=self.queued.append,
            memory_stats_as_nested_dict=lambda device: stats,
            is_initialized=lambda: True,
            memory=types.SimpleNamespace(get_allocator_backend=lambda: "native"),
            get_device_properties=lambda device: types.SimpleNamespace(
                total_memory=2048, uuid="1-2", name="GPU"
            ),
        )
        self._C = types.SimpleNamespace(
            _cuda_attach_out_of_memory_observer=self.observers.append,
        )
        self.is_grad_enabled = lambda: True

    def start(self) -> None:
        for call in self.queued:
            call()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    source = FakeSource()
    monkeypatch.setitem(sys.modules, "torch", source)  # type: ignore[arg-type]
    monkeypatch.setattr(oom_watch, "_attached", set())
    monkeypatch.setattr(oom_watch, "_observers", [])
    return source


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    made: Any = FakeRecorder(folder=tmp_path)
    return made


def attached(fake: FakeSource, recorder: Any) -> OomObserver:
    watch = OomObserver(recorder, lambda: None)
    watch.attach()
    fake.start()
    return watch


def written(recorder: Any) -> OomReport:
    """Return the report in the folder of a run that has one."""
    report = read_report(recorder.folder)
    assert report is not None
    return report


class OutOfMemoryError(RuntimeError):
    """As torch's is named."""


def test_one_observer_a_process_waits_for_torch_to_start_cuda(
    fake: FakeSource, recorder: Any
) -> None:
    first, second = OomObserver(recorder, lambda: None), OomObserver(recorder, lambda: None)
    first.attach()
    second.attach()
    fake.start()
    (observer,) = fake.observers
    observer(0, 300, 2048, 10)
    assert not first.pending
    assert second.pending  # the run that began last
    for peak in (990.0, 10.0):  # reset since: torch's own is 950
        second.observe({"memory/peak_allocated": peak})
    observer(0, 300, 2048, 10)
    assert written(recorder).last.peak_allocated == 990
    second.close()
    observer(0, 300, 2048, 10)
    assert first.pending
    first.close()
    observer(0, 300, 2048, 10)  # no run is left


OTHERS = FakeProcess(2**22 + 8, 1), FakeProcess(2**22 + 7, 2)


def test_the_driver_lists_who_holds_the_gpu(
    fake: FakeSource, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu("GPU-oom", processes=[FakeProcess(os.getpid(), 5), *OTHERS])
    library = install(monkeypatch, FakeNvml(gpu))
    attached(fake, recorder)

    def failure(uuid: str, total: int) -> OomRecord:
        about = types.SimpleNamespace(total_memory=total, uuid=uuid, name="GPU")
        fake.cuda.get_device_properties = lambda device: about
        fake.observers[0](0, 300, 2048, 10)
        return written(recorder).last

    for _ in range(2):
        found = failure("oom", 18)
        assert (found.others, found.holders) == (3, f"Process {2**22 + 7} and 1 more")
    assert library.calls["nvmlInitWithFlags"] == 1
    assert "not found" in str(failure("other", 18).others_reason)
    assert failure("oom", GIB).others_reason == HIDDEN


def test_torch_that_is_imported_later_is_found_by_the_sampler(
    fake: FakeSource, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = OomObserver(recorder, lambda: None)
    monkeypatch.delitem(sys.modules, "torch")
    watch.attach()
    watch.observe({})
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    fake.cuda._initialized = True  # too late for the sampler's thread
    watch.observe({})
    assert fake.queued == []
    fake.cuda._initialized = False
    watch.observe({})
    watch.observe({})
    assert len(fake.queued) == 1


def test_the_observer_raises_nothing_and_says_what_is_missing(
    fake: FakeSource, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.cuda.memory_stats_as_nested_dict = lambda device: {}["x"]
    attached(fake, recorder)
    fake.observers[0](0, 300, 2048, 10)
    record = written(recorder).last
    assert "counters: KeyError" in str(record.incomplete)
    assert (record.requested, record.free) == (300, 10)

    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(capture, "add_allocation", broken)
    fake.observers[0](0, 300, 2048, 10)


def test_a_failure_during_a_capture_is_left_alone(fake: FakeSource, recorder: Any) -> None:
    attached(fake, recorder)
    inner = fake.cuda.memory_stats_as_nested_dict

    def again(device: int) -> Any:
        thread = threading.Thread(target=fake.observers[0], args=(0, 1, 1, 1))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        return inner(device)

    fake.cuda.memory_stats_as_nested_dict = again
    fake.observers[0](0, 300, 2048, 10)
    assert written(recorder).seen == 1


def test_the_last_is_kept_and_all_are_counted(fake: FakeSource, recorder: Any) -> None:
    watch = attached(fake, recorder)
    for size in range(1, 8):
        fake.observers[0](0, size, 2048, 10)
    watch.settle()
    watch.settle()
    report = written(recorder)
    assert (report.last.requested, report.seen, report.ended) == (7, 7, False)
    assert [kind for kind, *_ in recorder.events] == ["oom_caught"]
    fake.observers[0](0, 9, 2048, 10)
    watch.close()
    assert [data["seen"] for _, _, data in recorder.events] == [7, 8]


def test_what_ends_the_run_is_joined_with_what_was_captured(
    fake: FakeSource, recorder: Any
) -> None:
    error = OutOfMemoryError(MESSAGE)
    watch = attached(fake, recorder)
    fake.observers[0](0, 300, 2048, 10)
    report = watch.failed(error, outcome(error))
    assert report is not None
    assert (report.ended, report.seen, report.last.requested) == (True, 1, 300)
    assert str(report.last.message).startswith("CUDA out of memory")
    watch.close()
    assert recorder.events == []
    assert written(recorder) == report


def test_a_retry_within_except_is_counted(fake: FakeSource, recorder: Any) -> None:
    attached(fake, recorder)

    def fail(attempts: int) -> None:
        fake.observers[0](0, 300, 2048, 10)
        try:
            raise OutOfMemoryError
        except OutOfMemoryError:
            if attempts > 1:
                fail(attempts - 1)

    for attempts in (1, 3, 1):  # those after the except block hold nothing
        fail(attempts)
        assert written(recorder).last.retries == attempts - 1


def test_what_another_gpu_holds_is_not_compared_with_the_own(
    fake: FakeSource, recorder: Any
) -> None:
    watch = attached(fake, recorder)
    watch._growth = lambda: GrowthTrend(1, 9, 0.0, 9.0)
    watch.observe({"memory/peak_allocated": 5000.0})
    watch.trains_on = 0
    for device, growth, peak in ((0, GrowthTrend(1, 9, 0.0, 9.0), 5000), (1, None, 950)):
        fake.observers[0](device, 300, 2048, 10)
        last = written(recorder).last
        assert (last.growth, last.peak_allocated, last.trains_on) == (growth, peak, 0)


@pytest.mark.parametrize(
    ("levels", "grown"),
    [
        (lambda n: 100.0 + 10 * n, 380.0),
        (lambda n: 100.0, None),  # results on the CPU
        (lambda n: 100.0 + 10 * min(n, 8), None),  # a cache that fills
    ],
)
def test_growth_over_batches_without_a_backward(
    fake: FakeSource, recorder: Any, levels: Callable[[int], float], grown: float | None
) -> None:
    watch = attached(fake, recorder)
    level = 0.0
    fake.cuda.current_device = lambda: 0
    fake.cuda.memory_stats_as_nested_dict = lambda device: {
        "allocated_bytes": {"all": {"current": level, "peak": level}}
    }
    for backward in range(9):  # a training: each batch is the first since the last backward
        level += 10
        watch.batches.add(1, backward)
        assert watch.batches.trend(0) is None
    for number in range(1, 41):
        level = levels(number)
        watch.batches.add(2, 9)
    trend = watch.batches.trend(0)
    assert (None if trend is None else trend.grown) == grown
    assert watch.batches.trend(1) is None


def test_a_forked_child_captures_nothing(
    fake: FakeSource, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = attached(fake, recorder)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 7)
    fake.observers[0](0, 300, 2048, 10)
    assert not watch.pending
