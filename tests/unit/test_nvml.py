"""The NVML source over the real pynvml and a fake library: opening, values, error policy."""

from __future__ import annotations

import os

import pynvml
import pytest

from stepscope.gpu import source as nvml
from stepscope.gpu.gpm import NOT_ARMED, SHARES
from stepscope.gpu.nvml_queries import (
    COUNTERS,
    FIELDS,
    PLAUSIBLE,
    SELDOM_S,
    SamplingTier,
)
from stepscope.gpu.nvml_reader import ONE_READING
from stepscope.gpu.processes import OTHERS
from stepscope.gpu.source import NullSource, NvmlSource, open_source
from stepscope.metrics import METRICS, Stream
from tests.support.fake_nvml import GIB, FakeClock, FakeGpu, FakeNvml, install

A, B = "GPU-aaaa", "GPU-bbbb"
ALL = tuple(SamplingTier)
RATES = {f"gpu/{link}_{way}" for link in ("pcie", "nvlink") for way in ("tx", "rx")}
LATER = dict.fromkeys(RATES, ONE_READING) | dict.fromkeys(SHARES, NOT_ARMED)
"""Why values are missing from a first read of a GPU that has them all."""


def lacks(source: NvmlSource, uuid: str = A) -> dict[str, str]:
    """Return the reasons for missing values, those of a first read left out."""
    reasons = source.reasons(uuid)
    return {key: why for key, why in reasons.items() if LATER.get(key) != why}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install(monkeypatch, FakeNvml(FakeGpu(A), FakeGpu(B, name="Other", util=99)))


@pytest.fixture
def gpu(library: FakeNvml) -> FakeGpu:
    return library.gpus[0]


@pytest.fixture
def source(library: FakeNvml, clock: FakeClock) -> NvmlSource:
    pynvml.nvmlInit()
    return NvmlSource(clock)


def test_every_gpu_metric_comes_from_one_field() -> None:
    keys = [key for entry in FIELDS for key in entry.keys]
    elsewhere = [*SHARES, OTHERS]  # from GPM, and from the list of processes
    assert sorted(keys + elsewhere) == sorted(m.key for m in METRICS if m.stream is Stream.DEVICES)
    assert sorted(keys) == sorted(PLAUSIBLE)
    assert set(keys) > COUNTERS


STORED = """
util 37 mem_util 12 power 312.5 power_limit 700 energy 9000 sm_clock 1980 mem_clock 3201 temp 51
throttle_reasons 0 temp_mem 47 temp_margin 36 throttle_power 5 throttle_sw_thermal 4
throttle_hw_thermal 3 throttle_brake 2 fan 30 ecc_corrected 7 ecc_uncorrected 0 remapped_rows 3
remap_pending 1 remap_failed 0 pcie_replays 4
"""


def test_values_arrive_in_stored_units(source: NvmlSource) -> None:
    words = STORED.split()
    stored = {f"gpu/{key}": float(words[i + 1]) for i, key in enumerate(words) if i % 2 == 0}
    memory = {"gpu/mem_used": 3.0 * GIB, "gpu/mem_total": 80.0 * GIB, "gpu/mem_reserved": GIB / 2}
    assert source.read(A, *ALL) == stored | memory
    assert source.reasons(A) == LATER


def test_a_tier_reads_only_its_own_calls(source: NvmlSource, library: FakeNvml) -> None:
    library.calls.clear()
    values = source.read(A, SamplingTier.MEDIUM)
    told = {"gpu/temp", "gpu/temp_mem", "gpu/temp_margin", "gpu/mem_clock", "gpu/energy"}
    assert set(values) == told | {"gpu/sm_clock", "gpu/throttle_reasons"}
    assert library.calls["nvmlDeviceGetFieldValues"] == 1
    assert library.calls["nvmlDeviceGetUtilizationRates"] == 0


def test_sentinels_and_garbage_are_dropped_with_a_reason(
    source: NvmlSource, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.util, gpu.used, gpu.power_mw, gpu.reasons = 2**32 - 1, 2**64 - 1, 2**32 - 1, 2**64 - 1
    gpu.sm_clock, gpu.temp, gpu.energy_mj = 2**32 - 1, 2**31 - 1, 2**64 - 1
    values = source.read(A, *ALL)
    assert {"gpu/mem_util", "gpu/mem_clock", "gpu/power_limit", "gpu/mem_total"} <= set(values)
    garbage = {"util", "mem_used", "power", "throttle_reasons", "sm_clock", "temp", "energy"}
    assert set(lacks(source)) == {f"gpu/{key}" for key in garbage}
    assert not set(lacks(source)) & set(values)
    assert source.reasons(A)["gpu/mem_used"] == "implausible value dropped"
    gpu.util = gpu.mem_util = gpu.used = gpu.power_mw = gpu.energy_mj = gpu.temp = 0
    gpu.sm_clock = gpu.mem_clock = gpu.reasons = 0
    clock.now += SELDOM_S
    values = source.read(A, *ALL)
    for key in ("util", "mem_util", "mem_used", "power", "temp", "sm_clock", "mem_clock"):
        assert values[f"gpu/{key}"] == 0.0, "a real zero is kept"


def test_a_falling_energy_counter_is_a_new_baseline(
    source: NvmlSource, gpu: FakeGpu, clock: FakeClock
) -> None:
    seen: list[float | None] = []
    for energy_mj in (5000, 5000, 1000, 2000):
        gpu.energy_mj = energy_mj
        seen.append(source.read(A, SamplingTier.MEDIUM).get("gpu/energy"))
        clock.now += SELDOM_S
    assert seen == [5.0, 5.0, None, 2.0]


def test_devices_are_listed_with_what_is_known(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    first, second = source.devices()
    assert (first.uuid, first.nvml_index, first.name) == (A, 0, "NVIDIA Test 80GB")
    assert first.memory_total == 80 * GIB
    assert (first.driver_version, first.mig) == ("580.95.05", False)
    assert (second.uuid, second.nvml_index) == (B, 1)
    library.missing = {"nvmlDeviceGetMigMode"}
    gpu.errors = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
    info = NvmlSource(clock).devices()[0]
    assert (info.memory_total, info.mig) == (None, False)
    gpu.errors = {"nvmlDeviceGetHandleByIndex_v2": 15}
    assert [info.uuid for info in NvmlSource(clock).devices()] == [B], "a lost one is left out"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (3, "not supported on this GPU"),
        (4, "permission"),
        (13, "not offered by this driver"),
        (25, "not offered by this driver"),
        (26, "not offered by this driver"),
    ],
)
def test_a_refused_call_or_field_is_asked_once(
    source: NvmlSource, gpu: FakeGpu, library: FakeNvml, code: int, reason: str
) -> None:
    gpu.errors, gpu.field_errors = {"nvmlDeviceGetUtilizationRates": code}, {82: code, 186: 3}
    for _ in range(3):
        values = source.read(A, SamplingTier.FAST, SamplingTier.MEDIUM)
        assert "gpu/util" not in values
        assert values["gpu/power"] == 300.0, "the average, by the older call"
    assert library.asked_fields.count(186) == 1
    assert library.calls["nvmlDeviceGetUtilizationRates"] == 1
    assert library.asked_fields.count(82) == 1
    assert lacks(source) == dict.fromkeys(("gpu/util", "gpu/mem_util", "gpu/temp_mem"), reason)


def test_the_older_call_answers_where_the_newer_is_missing(
    source: NvmlSource, library: FakeNvml
) -> None:
    library.missing = {
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
    }
    values = source.read(A, *ALL)
    assert values["gpu/temp"] == 51.0
    assert values["gpu/mem_used"] == 3.5 * GIB  # v1 counts the reserve
    assert values["gpu/throttle_reasons"] == 0.0
    assert values["gpu/power"] == 300.0
    assert values["gpu/energy"] == 9000.0
    assert values["gpu/mem_total"] == 80.0 * GIB
    old = {"temp_mem", "throttle_power", "throttle_sw_thermal", "throttle_hw_thermal"}
    old |= {"throttle_brake", "mem_reserved", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx"}
    assert lacks(source) == {f"gpu/{key}": "not offered by this driver" for key in old}


@pytest.mark.parametrize("code", [6, 7, 10, 21])
def test_no_data_is_asked_again_next_time(
    source: NvmlSource, gpu: FakeGpu, library: FakeNvml, code: int
) -> None:
    gpu.errors = {"nvmlDeviceGetUtilizationRates": code}
    assert "gpu/util" not in source.read(A, SamplingTier.FAST)
    assert library.calls["nvmlDeviceGetUtilizationRates"] == 1
    assert source.reasons(A)["gpu/util"] == "no data"
    gpu.errors = {}
    assert source.read(A, SamplingTier.FAST)["gpu/util"] == 37.0
    assert lacks(source) == {}


@pytest.mark.parametrize("code", [11, 17, 19, 20, 27, 999])
def test_other_errors_back_off_from_half_a_second_to_thirty(
    source: NvmlSource, gpu: FakeGpu, library: FakeNvml, clock: FakeClock, code: int
) -> None:
    gpu.errors, gpu.field_errors = {"nvmlDeviceGetUtilizationRates": code}, {82: code}
    asked_at: list[float] = []
    for _ in range(1000):
        before = library.calls["nvmlDeviceGetUtilizationRates"]
        source.read(A, SamplingTier.FAST)
        if library.calls["nvmlDeviceGetUtilizationRates"] > before:
            asked_at.append(clock.now)
        clock.now += 0.125
    pauses = [later - earlier for earlier, later in zip(asked_at, asked_at[1:], strict=False)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    clock.now += 30
    assert "gpu/energy" in source.read(A, SamplingTier.MEDIUM), "a field backs off alone"
    assert source.reasons(A)["gpu/temp_mem"].startswith("error: ")
    assert source.reasons(A)["gpu/util"].startswith("error: ")
    gpu.errors = {}
    clock.now += 30
    assert source.read(A, SamplingTier.FAST)["gpu/util"] == 37.0


@pytest.mark.parametrize("code", [2, 9, 15, 16, 28])
def test_a_lost_gpu_is_left_alone_and_looked_for_every_five_seconds(
    source: NvmlSource, gpu: FakeGpu, library: FakeNvml, clock: FakeClock, code: int
) -> None:
    source.read(A, *ALL)
    gpu.errors = {"nvmlDeviceGetUtilizationRates": code, "nvmlDeviceGetHandleByUUID": 15}
    library.calls.clear()
    assert source.read(A, *ALL) == {}
    assert set(library.calls) <= {"nvmlDeviceGetUtilizationRates", "nvmlErrorString"}
    assert (source.lost(A) or "").startswith("lost: ")
    keys = {key for entry in FIELDS for key in entry.keys}
    assert set(source.reasons(A)) == keys | {*SHARES}
    assert source.lost(B) is None
    library.calls.clear()
    for _ in range(100):
        assert source.read(A, *ALL) == {}
        assert source.read(B, SamplingTier.FAST)["gpu/util"] == 99.0
        clock.now += 0.125
    assert library.calls["nvmlDeviceGetHandleByUUID"] == 2 + 1  # A at 5 s and 10 s, B once

    gpu.errors = {}
    clock.now += 5
    assert source.read(A, *ALL)["gpu/util"] == 37.0
    assert (source.lost(A), lacks(source)) == (None, {})


def test_a_foreign_shutdown_is_healed_by_one_init_as_soon_as_that_succeeds(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    source.read(A, SamplingTier.FAST)
    source.read(B, SamplingTier.FAST)
    clock.now += 10
    library.calls.clear()
    gpu.errors = {"nvmlDeviceGetUtilizationRates": 1}
    library.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    for _ in range(3):
        assert source.read(A, SamplingTier.FAST) == {}
        clock.now += 10
    assert library.calls["nvmlInitWithFlags"] == 2, "each time that it is looked for"
    library.errors, gpu.errors = {}, {}
    assert source.read(A, SamplingTier.FAST)["gpu/util"] == 37.0
    assert source.read(B, SamplingTier.FAST)["gpu/util"] == 99.0
    assert library.calls["nvmlInitWithFlags"] == 3
    assert library.calls["nvmlDeviceGetHandleByUUID"] == 2  # handles do not outlive a shutdown
    assert source.lost(A) is None


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
    ("code", "words", "opens"),
    [
        (9, "not loaded", True),
        (12, "libnvidia-ml", True),
        (18, "restart", False),
        (999, "Unknown Error", True),
    ],
)
def test_no_driver_is_one_sentence_and_looked_for_again_after_30_s(
    library: FakeNvml, clock: FakeClock, code: int, words: str, opens: bool
) -> None:
    library.errors = {"nvmlInitWithFlags": code}
    source = open_source(clock)
    assert isinstance(source, NullSource)
    assert words in source.reason
    assert source.reason.endswith(".")
    assert (source.devices(), source.read(A, *ALL), source.reasons(A)) == ([], {}, {})
    assert source.lost(A) is None
    library.errors = {}
    clock.now += 29
    assert isinstance(open_source(clock), NullSource)
    clock.now += 2
    assert isinstance(open_source(clock), NvmlSource) is opens


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    monkeypatch.setattr(nvml, "_opened", {})
    assert "libnvidia-ml" in (open_source().reason or "")


def test_a_foreign_pynvml_package_and_a_driver_without_gpus_are_told(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as foreign:
        foreign.delattr(pynvml, "_nvmlGetFunctionPointer")
        assert "nvidia-ml-py" in (open_source().reason or "")
    install(monkeypatch, FakeNvml())
    assert open_source().reason == "The NVIDIA driver reports no GPU."
