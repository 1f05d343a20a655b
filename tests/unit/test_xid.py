"""The watch for Xid errors over a fake library, and what the errors mean."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest

from stepscope.gpu import nvml_device
from stepscope.gpu.machine_state import XidEvent
from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NOT_BY_GPU, PERMISSION
from stepscope.gpu.source import NvmlSource
from stepscope.gpu.xid import XidWatcher
from tests.support.fake_nvml import FakeClock, FakeGpu, FakeNvml, install
from tests.support.waiting import wait_until

A, B = "GPU-aaaa", "GPU-bbbb"
XID, OTHER = 8, 1
PATIENCE_S = 10.0
REGISTER = "nvmlDeviceRegisterEvents"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_device, "RETRY_S", 0.01)


class Bench:
    """Two GPUs of a fake library, the watches of a test and the events that they report."""

    def __init__(self, library: FakeNvml) -> None:
        self.library = library
        self.events: queue.Queue[XidEvent] = queue.Queue()
        self.watches: list[XidWatcher] = []

    def watch(self, **options: Any) -> XidWatcher:
        self.watches.append(XidWatcher(NvmlSource(FakeClock()), self.events.put, **options))
        return self.watches[-1]

    def next(self) -> XidEvent:
        return self.events.get(timeout=PATIENCE_S)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(install(monkeypatch, FakeNvml(FakeGpu(A), FakeGpu(B))))
    yield bench
    for watch in bench.watches:
        assert watch.stop()


def test_an_error_comes_with_its_gpu_and_name(bench: Bench) -> None:
    bench.library.xids = [(B, 31, XID), (A, 5, OTHER), 10, (A, 79, XID)]
    watch = bench.watch()
    first, second = bench.next(), bench.next()
    assert (first.uuid, first.code) == (B, 31)
    assert (second.uuid, second.code) == (A, 79)
    assert watch.reason(A) is watch.reason(B) is None


def test_a_gpu_that_fell_off_the_bus_is_registered_again(bench: Bench) -> None:
    bench.library.xids = [(A, 79, XID)]
    bench.watch(uuids={A})
    bench.next()
    wait_until(lambda: bench.library.registered.count(A) >= 2)
    assert set(bench.library.registered) == {A}


def test_a_set_that_fails_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.library.xids = [15, 999, (A, 13, XID)]
    bench.watch()
    assert bench.next().code == 13
    assert bench.library.calls["nvmlEventSetCreate"] == 3

    def fail() -> None:
        raise AttributeError("of another version")

    with monkeypatch.context() as broken:
        broken.setattr(pynvml, "nvmlEventSetCreate", fail)
        watch = bench.watch()
        wait_until(lambda: watch.reason(A) == "error: of another version")
    wait_until(lambda: watch.reason(A) is None)


@pytest.mark.parametrize("code", [15, 999])
def test_a_gpu_that_fails_at_first_is_registered_later(bench: Bench, code: int) -> None:
    bench.library.gpus[0].errors = {REGISTER: code}
    watch = bench.watch()
    wait_until(lambda: watch.reason(A) is not None)
    assert bench.library.registered == [B]
    bench.library.gpus[0].errors = {}
    wait_until(lambda: bench.library.registered == [B, A])
    wait_until(lambda: watch.reason(A) is None)


REFUSALS = [(3, NOT_BY_GPU), (4, PERMISSION), (13, NOT_BY_DRIVER)]


@pytest.mark.parametrize(("code", "reason"), REFUSALS)
def test_a_refusal_of_all_gpus_ends_the_watch(bench: Bench, code: int, reason: str) -> None:
    bench.library.errors = {REGISTER: code}
    watch = bench.watch()
    wait_until(lambda: watch.reason(A) == watch.reason(B) == reason)
    assert bench.library.calls[REGISTER] == 2


def test_gpus_in_mig_mode_are_watched_for_their_instances(bench: Bench) -> None:
    bench.library.gpus[1].mig = 1
    bench.library.xids = [(B, 13, XID)]
    bench.watch(uuids={"MIG-1"})
    assert bench.next().uuid == B
    assert bench.library.registered == [B]
    wait_until(lambda: bench.library.calls["nvmlEventSetWait_v2"] > 1)
    bench.watches[0].stop(timeout_s=0.0)
    bench.library.xids.append((B, 31, XID))
    assert bench.watches[0].stop()
    assert bench.events.empty(), "an event after the stop is dropped"


def test_a_refusal_of_one_gpu_has_a_reason_and_the_others_are_watched(bench: Bench) -> None:
    bench.library.gpus[0].errors = {REGISTER: 3}
    bench.library.xids = [(B, 31, XID)]
    watch = bench.watch()
    assert bench.next().uuid == B
    assert (watch.reason(A), watch.reason(B)) == (NOT_BY_GPU, None)
