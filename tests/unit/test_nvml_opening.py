"""Opening NVML gives a source or one sentence; and the words of its throttle mask."""

from __future__ import annotations

import os

import pynvml
import pytest

from stepscope.gpu import source as nvml
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.source import NullSource, NvmlSource, open_source
from tests.support.fake_nvml import FakeClock, FakeGpu, FakeNvml, install


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install(monkeypatch, FakeNvml(FakeGpu("GPU-aaaa")))


def test_opening_happens_once_per_process(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_source()
    assert isinstance(first, NvmlSource)
    assert open_source() is first
    assert library.calls["nvmlInitWithFlags"] == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    assert open_source() is not first
    assert library.calls["nvmlInitWithFlags"] == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [(9, "not loaded"), (12, "libnvidia-ml"), (18, "restart"), (999, "Unknown Error")],
)
def test_no_driver_is_one_sentence(library: FakeNvml, code: int, words: str) -> None:
    library.errors = {"nvmlInitWithFlags": code}
    source = open_source()
    assert isinstance(source, NullSource)
    assert words in source.reason
    assert source.reason.endswith(".")
    assert (source.devices(), source.read("GPU-a", *SamplingTier), source.reasons("GPU-a")) == (
        [],
        {},
        {},
    )
    assert source.lost("GPU-a") is None


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    monkeypatch.setattr(nvml, "_opened", {})
    assert "libnvidia-ml" in (open_source().reason or "")


@pytest.mark.parametrize(("code", "opens"), [(9, True), (12, True), (18, False)])
def test_a_missing_driver_is_looked_for_again_after_30_s(
    library: FakeNvml, clock: FakeClock, code: int, opens: bool
) -> None:
    library.errors = {"nvmlInitWithFlags": code}
    open_source(clock)
    library.errors = {}
    clock.now += 29
    assert isinstance(open_source(clock), NullSource)
    clock.now += 2
    assert isinstance(open_source(clock), NvmlSource) is opens


def test_a_foreign_pynvml_package_is_told(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pynvml, "_nvmlGetFunctionPointer")
    assert "nvidia-ml-py" in (open_source().reason or "")


def test_a_driver_without_gpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    assert open_source().reason == "The NVIDIA driver reports no GPU."
