"""The watch for Xid errors over a fake library, and what the errors mean."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator

import pynvml
import pytest

from stepscope.gpu import xid
from stepscope.gpu.source import NvmlSource
from stepscope.gpu.xid import NO_INSTANCE, VENDOR, XidEvent, XidWatcher, xid_event
from tests.support.fake_nvml import FakeClock, FakeGpu, FakeNvml, install

A, B = "GPU-aaaa", "GPU-bbbb"
XID, OTHER = 8, 1
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid, "LOOK_AGAIN_S", 0.01)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install(monkeypatch, FakeNvml(FakeGpu(A), FakeGpu(B)))


@pytest.fixture
def source(library: FakeNvml) -> NvmlSource:
    return NvmlSource(FakeClock())


@pytest.fixture
def heard() -> queue.Queue[XidEvent]:
    return queue.Queue()


@pytest.fixture
def watches() -> Iterator[list[XidWatcher]]:
    started: list[XidWatcher] = []
    yield started
    for watch in started:
        assert watch.stop()


def until_it_ends(watch: XidWatcher) -> str | None:
    deadline = time.monotonic() + PATIENCE_S
    while watch.reason is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return watch.reason


def test_an_error_comes_with_its_gpu_and_words(
    library: FakeNvml,
    source: NvmlSource,
    heard: queue.Queue[XidEvent],
    watches: list[XidWatcher],
) -> None:
    library.xids = [(B, 31, XID), (A, 5, OTHER), 10, (A, 79, XID)]
    watches.append(XidWatcher(source, heard.put))
    first, second = heard.get(timeout=PATIENCE_S), heard.get(timeout=PATIENCE_S)
    assert (first.uuid, first.code, first.gpu_instance) == (B, 31, None)
    assert "memory that is not mapped" in first.text
    assert (second.uuid, second.code) == (A, 79)
    assert heard.empty(), "an event of another kind is no error"


def test_a_gpu_that_fell_off_the_bus_is_registered_again(
    library: FakeNvml,
    source: NvmlSource,
    heard: queue.Queue[XidEvent],
    watches: list[XidWatcher],
) -> None:
    library.xids = [(A, 79, XID)]
    watches.append(XidWatcher(source, heard.put, uuids={A}))
    heard.get(timeout=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while library.registered.count(A) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert set(library.registered) == {A}
    assert library.registered.count(A) >= 2


def test_a_set_that_fails_is_made_anew(
    library: FakeNvml,
    source: NvmlSource,
    heard: queue.Queue[XidEvent],
    watches: list[XidWatcher],
) -> None:
    library.xids = [15, 999, (A, 13, XID)]
    watches.append(XidWatcher(source, heard.put))
    assert heard.get(timeout=PATIENCE_S).code == 13
    assert library.calls["nvmlEventSetCreate"] == 3
    assert library.calls["nvmlEventSetFree"] == 2


def test_a_gpu_that_is_lost_at_first_is_registered_later(
    library: FakeNvml,
    source: NvmlSource,
    heard: queue.Queue[XidEvent],
    watches: list[XidWatcher],
) -> None:
    library.gpus[0].errors = {"nvmlDeviceRegisterEvents": 15}
    watches.append(XidWatcher(source, heard.put))
    deadline = time.monotonic() + PATIENCE_S
    while library.registered != [B] and time.monotonic() < deadline:
        time.sleep(0.001)
    library.gpus[0].errors = {}
    while A not in library.registered and time.monotonic() < deadline:
        time.sleep(0.001)
    assert library.registered == [B, A]
    assert library.calls["nvmlEventSetCreate"] == 1


@pytest.mark.parametrize("code", [3, 4, 13])
def test_a_refusal_ends_the_watch_and_says_why(
    library: FakeNvml, source: NvmlSource, watches: list[XidWatcher], code: int
) -> None:
    for gpu in library.gpus:
        gpu.errors = {"nvmlDeviceRegisterEvents": code}
    watches.append(XidWatcher(source, print))
    assert until_it_ends(watches[0])
    assert library.calls["nvmlDeviceRegisterEvents"] == 2
    assert library.calls["nvmlEventSetWait_v2"] == 0


def test_without_a_gpu_the_watch_ends(source: NvmlSource, watches: list[XidWatcher]) -> None:
    watches.append(XidWatcher(source, print, uuids=()))
    assert until_it_ends(watches[0]) == "no GPU"


def test_one_gpu_that_is_refused_is_told_and_the_others_are_watched(
    library: FakeNvml,
    source: NvmlSource,
    heard: queue.Queue[XidEvent],
    watches: list[XidWatcher],
) -> None:
    library.gpus[0].errors = {"nvmlDeviceRegisterEvents": pynvml.NVML_ERROR_NOT_SUPPORTED}
    library.xids = [(B, 31, XID)]
    watches.append(XidWatcher(source, heard.put))
    assert heard.get(timeout=PATIENCE_S).uuid == B
    assert watches[0].reason is None
    assert dict(watches[0].refused) == {A: "Not Supported"}


def test_a_library_that_does_not_fit_ends_the_watch(
    library: FakeNvml,
    source: NvmlSource,
    watches: list[XidWatcher],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise AttributeError("odd")

    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", fail)
    with caplog.at_level(logging.WARNING):
        watches.append(XidWatcher(source, print))
        assert until_it_ends(watches[0]) == "AttributeError: odd"
        assert watches[0].stop()
    assert len(caplog.records) == 1


def test_gpus_in_mig_mode_are_watched_for_their_instances(
    library: FakeNvml, heard: queue.Queue[XidEvent], watches: list[XidWatcher]
) -> None:
    library.gpus[1].mig = 1
    library.xids = [(B, 13, XID)]
    watches.append(XidWatcher(NvmlSource(FakeClock()), heard.put, uuids={"MIG-1"}))
    assert heard.get(timeout=PATIENCE_S).uuid == B
    assert library.registered == [B]


def test_what_comes_after_the_stop_is_not_told(
    library: FakeNvml,
    source: NvmlSource,
    heard: queue.Queue[XidEvent],
    watches: list[XidWatcher],
) -> None:
    library.xids = [10]
    watches.append(XidWatcher(source, heard.put))
    deadline = time.monotonic() + PATIENCE_S
    while library.xids and time.monotonic() < deadline:
        time.sleep(0.001)
    watches[0].stop(timeout_s=0.0)
    library.xids.append((A, 31, XID))
    assert watches[0].stop()
    assert heard.empty()


# --- words ----------------------------------------------------------------------------------------


def test_an_error_that_the_driver_cannot_name_is_called_so() -> None:
    event = xid_event(A, 999, 3)
    assert event.text == "Xid 999: the driver cannot name the error"
    assert (event.gpu_instance, event.advice) == (3, VENDOR)


@pytest.mark.parametrize("code", [13, 31, 48, 63, 74, 79, 94, 95, 119, 131, 100, 147, 154])
def test_known_errors_have_a_text_and_advice(code: int) -> None:
    known = xid_event(A, code, NO_INSTANCE)
    assert "does not explain" not in known.text
    assert known.advice.endswith(".")
    assert not known.text.endswith(".")


@pytest.mark.parametrize("code", [7, 10_000])
def test_an_unknown_error_has_a_text(code: int) -> None:
    assert "does not explain" in xid_event(A, code, NO_INSTANCE).text
