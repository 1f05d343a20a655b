"""The watch for Xid errors over a fake library, and what the errors mean."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest

from stepscope.gpu import xid
from stepscope.gpu.source import NvmlSource
from stepscope.gpu.xid import NO_INSTANCE, VENDOR, XidEvent, XidWatcher, xid_event
from tests.support.fake_nvml import FakeClock, FakeGpu, FakeNvml, install
from tests.support.waiting import wait_until

A, B = "GPU-aaaa", "GPU-bbbb"
XID, OTHER = 8, 1
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid, "LOOK_AGAIN_S", 0.01)


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


def until_it_ends(watch: XidWatcher) -> str | None:
    wait_until(lambda: watch.reason is not None)
    return watch.reason


def test_an_error_comes_with_its_gpu_and_words(bench: Bench) -> None:
    bench.library.xids = [(B, 31, XID), (A, 5, OTHER), 10, (A, 79, XID)]
    bench.watch()
    first, second = bench.next(), bench.next()
    assert (first.uuid, first.code, first.gpu_instance) == (B, 31, None)
    assert "memory that is not mapped" in first.text
    assert (second.uuid, second.code) == (A, 79)
    assert bench.events.empty(), "an event of another kind is no error"


def test_a_gpu_that_fell_off_the_bus_is_registered_again(bench: Bench) -> None:
    bench.library.xids = [(A, 79, XID)]
    bench.watch(uuids={A})
    bench.next()
    wait_until(lambda: bench.library.registered.count(A) >= 2)
    assert set(bench.library.registered) == {A}


def test_a_set_that_fails_is_made_anew(bench: Bench) -> None:
    bench.library.xids = [15, 999, (A, 13, XID)]
    bench.watch()
    assert bench.next().code == 13
    assert bench.library.calls["nvmlEventSetCreate"] == 3
    assert bench.library.calls["nvmlEventSetFree"] == 2


def test_a_gpu_that_is_lost_at_first_is_registered_later(bench: Bench) -> None:
    bench.library.gpus[0].errors = {"nvmlDeviceRegisterEvents": 15}
    bench.watch()
    wait_until(lambda: bench.library.registered == [B])
    bench.library.gpus[0].errors = {}
    wait_until(lambda: bench.library.registered == [B, A])
    assert bench.library.calls["nvmlEventSetCreate"] == 1


@pytest.mark.parametrize("code", [3, 4, 13])
def test_a_refusal_ends_the_watch_and_says_why(bench: Bench, code: int) -> None:
    bench.library.errors = {"nvmlDeviceRegisterEvents": code}
    assert until_it_ends(bench.watch())
    assert bench.library.calls["nvmlDeviceRegisterEvents"] == 2
    assert bench.library.calls["nvmlEventSetWait_v2"] == 0
    assert until_it_ends(bench.watch(uuids=())) == "no GPU"


def test_one_gpu_that_is_refused_is_told_and_the_others_are_watched(bench: Bench) -> None:
    bench.library.gpus[0].errors = {"nvmlDeviceRegisterEvents": pynvml.NVML_ERROR_NOT_SUPPORTED}
    bench.library.xids = [(B, 31, XID)]
    watch = bench.watch()
    assert bench.next().uuid == B
    assert watch.reason is None
    assert dict(watch.refused) == {A: "Not Supported"}


def test_a_library_that_does_not_fit_ends_the_watch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise AttributeError("odd")

    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", fail)
    with caplog.at_level(logging.WARNING):
        watch = bench.watch()
        assert until_it_ends(watch) == "AttributeError: odd"
        assert watch.stop()
    assert len(caplog.records) == 1


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
    assert bench.events.empty(), "what comes after the stop is not told"


def test_what_an_error_means() -> None:
    unnamed = xid_event(A, 999, 3)
    assert unnamed.text == "Xid 999: the driver cannot name the error"
    assert (unnamed.gpu_instance, unnamed.advice) == (3, VENDOR)
    assert "does not explain" in xid_event(A, 10_000, NO_INSTANCE).text
    assert "does not explain" not in xid_event(A, 79, NO_INSTANCE).text
