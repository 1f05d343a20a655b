"""The NVML source over the real pynvml and a fake library: values, the error rule, opening."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from stepscope.common.metrics import METRICS, Stream
from stepscope.gpu import source as nvml
from stepscope.gpu.gpm import BEFORE_HOPPER, SHARES
from stepscope.gpu.nvml_device import (
    NOT_BY_DRIVER,
    NOT_BY_GPU,
    PERMISSION,
    RETRY_S,
)
from stepscope.gpu.nvml_queries import (
    IMPLAUSIBLE,
    KEYS,
    MAY_WRAP,
    ONE_READING,
    QUERIES,
    SamplingTier,
)
from stepscope.gpu.process_memory import OTHERS
from stepscope.gpu.source import NullSource, NvmlSource, open_source
from tests.support.fake_nvml import GIB, NS, FakeClock, FakeGpu, FakeNvml, install

A, B = "GPU-aaaa", "GPU-bbbb"
ALL = tuple(SamplingTier)
RATES = {f"gpu/{link}_{way}" for link in ("pcie", "nvlink") for way in ("tx", "rx")}
LATER = dict.fromkeys(RATES, ONE_READING) | dict.fromkeys(SHARES, BEFORE_HOPPER)
"""Why values are missing from a first read of a GPU that has them all."""
UTIL = "nvmlDeviceGetUtilizationRates"
HANDLE = "nvmlDeviceGetHandleByUUID"


def missing(source: NvmlSource, uuid: str = A) -> dict[str, str]:
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


def test_every_gpu_metric_comes_from_one_query() -> None:
    keys = [key for query in QUERIES for key in query.metrics]
    elsewhere = [*SHARES, OTHERS]  # from GPM, and from the list of processes
    assert sorted(keys + elsewhere) == sorted(m.key for m in METRICS if m.stream is Stream.DEVICES)


STORED = {
    "gpu/util": 37,
    "gpu/mem_util": 12,
    "gpu/mem_used": 3.0 * GIB,
    "gpu/mem_total": 80.0 * GIB,
    "gpu/mem_reserved": GIB / 2,
    "gpu/power": 312.5,
    "gpu/power_limit": 700,
    "gpu/energy": 9000,
    "gpu/sm_clock": 1980,
    "gpu/mem_clock": 3201,
    "gpu/temp": 51,
    "gpu/temp_mem": 47,
    "gpu/temp_margin": 36,
    "gpu/throttle_reasons": 0,
    "gpu/throttle_power": 5,
    "gpu/throttle_sw_thermal": 4,
    "gpu/throttle_hw_thermal": 3,
    "gpu/throttle_brake": 2,
    "gpu/fan": 30,
    "gpu/ecc_corrected": 7,
    "gpu/ecc_uncorrected": 0,
    "gpu/remapped_rows": 3,
    "gpu/remap_pending": 1,
    "gpu/remap_failed": 0,
    "gpu/pcie_replays": 4,
}


def test_values_arrive_in_stored_units(source: NvmlSource) -> None:
    assert source.read(A, *ALL) == STORED
    assert source.reasons(A) == LATER


def test_a_tier_reads_only_its_own_calls_and_slow_calls_have_a_longer_period(
    source: NvmlSource, library: FakeNvml, clock: FakeClock
) -> None:
    periods = {"gpu/temp_margin": 5.0, "gpu/energy": 2.0}
    medium = {"gpu/temp", "gpu/temp_mem", "gpu/mem_clock", "gpu/sm_clock", "gpu/throttle_reasons"}
    library.calls.clear()
    for tick in range(21):
        due = {key for key, period_s in periods.items() if tick * 0.5 % period_s == 0}
        assert set(source.read(A, SamplingTier.MEDIUM)) == medium | due
        clock.now += 0.5
    assert library.calls[UTIL] == 0


def test_sentinels_are_dropped_with_a_reason_and_a_real_zero_is_kept(
    source: NvmlSource, gpu: FakeGpu, clock: FakeClock
) -> None:
    names = dict.fromkeys(("util", "power_mw", "sm_clock"), 2**32 - 1) | {"temp": 2**31 - 1}
    names |= dict.fromkeys(("used", "reasons", "energy_mj"), 2**64 - 1)
    for name, sentinel in names.items():
        setattr(gpu, name, sentinel)
    values = source.read(A, *ALL)
    dropped = {"util", "mem_used", "power", "throttle_reasons", "sm_clock", "temp", "energy"}
    assert missing(source) == {f"gpu/{key}": IMPLAUSIBLE for key in dropped}
    assert set(values) == STORED.keys() - missing(source).keys()
    for name in names:
        setattr(gpu, name, 0)
    clock.now += 5
    values = source.read(A, *ALL)
    assert {values[f"gpu/{key}"] for key in dropped} == {0.0}
    assert missing(source) == {}


def test_devices_are_listed_with_what_is_known(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    first, second = source.devices()
    assert (first.name, first.memory_total) == ("NVIDIA Test 80GB", 80 * GIB)
    assert (first.driver_version, first.mig) == ("580.95.05", False)
    assert (second.uuid, second.nvml_index) == (B, 1)
    library.missing = {"nvmlDeviceGetMigMode"}
    gpu.errors = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
    info = NvmlSource(clock).devices()[0]
    assert (info.memory_total, info.mig) == (None, False)
    gpu.errors = {"nvmlDeviceGetHandleByIndex_v2": 15}
    assert [info.uuid for info in NvmlSource(clock).devices()] == [B], "a lost one is left out"


REFUSED = [(2, NOT_BY_GPU), (3, NOT_BY_GPU), (4, PERMISSION), (13, NOT_BY_DRIVER)]


@pytest.mark.parametrize(("code", "reason"), REFUSED)
def test_a_refused_call_has_a_reason_for_the_life_of_the_process(
    source: NvmlSource,
    gpu: FakeGpu,
    library: FakeNvml,
    clock: FakeClock,
    code: int,
    reason: str,
) -> None:
    gpu.errors = {UTIL: code}
    gpu.field_errors = {82: code, 186: 3}
    refused = dict.fromkeys(("gpu/util", "gpu/mem_util", "gpu/temp_mem"), reason)
    for _ in range(3):
        values = source.read(A, *ALL)
        assert values["gpu/power"] == 300.0, "the average, by the older call"
        assert not refused.keys() & values.keys()
        assert missing(source).items() >= refused.items()
        clock.now += RETRY_S
    assert library.calls[UTIL] == 1
    assert library.asked_fields.count(82) == library.asked_fields.count(186) == 1


def test_the_older_call_is_used_where_the_newer_is_missing(
    source: NvmlSource, library: FakeNvml
) -> None:
    library.missing = {
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
    }
    values = source.read(A, *ALL)
    assert values["gpu/mem_used"] == 3.5 * GIB  # v1 counts the reserve
    assert values["gpu/power"] == 300.0
    for key in ("gpu/temp", "gpu/throttle_reasons", "gpu/energy"):
        assert values[key] == STORED[key]
    new = {"gpu/temp_mem", "gpu/throttle_brake", "gpu/mem_reserved", *RATES}
    assert missing(source).items() >= dict.fromkeys(new, NOT_BY_DRIVER).items()


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*_args: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("error", [0, 10, 999, AttributeError("x"), OSError("x")], ids=str)
def test_any_other_error_is_a_reason_for_five_seconds(
    source: NvmlSource,
    library: FakeNvml,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    error: int | Exception,
) -> None:
    with monkeypatch.context() as broken:
        raised = pynvml.NVMLError(error) if isinstance(error, int) else error
        broken.setattr(pynvml, UTIL, _raise(raised))
        values = source.read(A, *ALL)
    assert STORED.keys() - values.keys() == {"gpu/util", "gpu/mem_util"} == missing(source).keys()
    assert missing(source)["gpu/util"].startswith("error: ")
    assert source.lost(A) is None
    clock.now += RETRY_S - 0.1
    assert "gpu/util" not in source.read(A, *ALL)
    assert library.calls[UTIL] == 0
    clock.now += 0.1
    assert source.read(A, *ALL)["gpu/util"] == 37.0


def test_an_older_call_answers_only_for_one_that_is_not_offered(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu
) -> None:
    gpu.errors = {"nvmlDeviceGetMemoryInfo_v2": 999, "nvmlDeviceGetTemperature": 4}
    library.missing = {"nvmlDeviceGetTemperatureV"}
    assert "gpu/mem_used" not in source.read(A, *ALL), "its used memory has the driver's reserve"
    assert missing(source)["gpu/temp"] == PERMISSION


@pytest.mark.parametrize("code", [9, 15, 16, 28])
def test_a_lost_gpu_is_left_alone_and_looked_for_every_five_seconds(
    source: NvmlSource, gpu: FakeGpu, library: FakeNvml, clock: FakeClock, code: int
) -> None:
    source.read(A, *ALL)
    source.read(B, *ALL)
    gpu.errors = {UTIL: code, HANDLE: 15}
    library.calls.clear()
    assert source.read(A, *ALL) == {}
    assert set(library.calls) <= {UTIL, "nvmlErrorString"}
    lost = source.lost(A) or ""
    assert lost.startswith("lost: ")
    assert source.reasons(A) == dict.fromkeys({*KEYS, *SHARES, "processes"}, lost)
    assert source.processes(A) is None
    for _ in range(100):
        assert source.read(A, *ALL) == {}
        assert source.read(B, SamplingTier.FAST)["gpu/util"] == 99.0
        clock.now += 0.125
    assert library.calls[HANDLE] == 2, "at 5 s and 10 s"
    assert source.lost(B) is None
    gpu.errors = {}
    clock.now += RETRY_S
    assert source.read(A, *ALL)["gpu/util"] == 37.0
    assert (source.lost(A), missing(source)) == (None, {})


def test_a_handle_that_has_become_invalid_is_acquired_again(
    source: NvmlSource, gpu: FakeGpu, library: FakeNvml, clock: FakeClock
) -> None:
    source.read(A, *ALL)
    gpu.errors = {UTIL: pynvml.NVML_ERROR_INVALID_ARGUMENT}
    assert "gpu/power" in source.read(A, *ALL)
    assert source.lost(A) is None
    assert library.calls[HANDLE] == 2
    gpu.errors[HANDLE] = pynvml.NVML_ERROR_NOT_FOUND
    clock.now += RETRY_S
    assert source.read(A, *ALL) == {}
    assert (source.lost(A) or "").startswith("not found: ")


def test_a_foreign_shutdown_is_healed_as_soon_as_an_initialization_succeeds(
    source: NvmlSource, library: FakeNvml, clock: FakeClock
) -> None:
    for uuid in (A, B):
        source.read(uuid, *ALL)
    library.calls.clear()
    library.errors = {UTIL: 1, HANDLE: 1, "nvmlInitWithFlags": 9}
    for _ in range(3):
        assert source.read(A, *ALL) == {}
        clock.now += 2 * RETRY_S
    assert source.lost(A)
    library.errors = {UTIL: 1}
    assert "gpu/power" in source.read(B, *ALL), "one call fails, the others get a new handle"
    assert source.lost(B) is None
    library.errors = {}
    clock.now += RETRY_S
    for uuid, util in ((A, 37.0), (B, 99.0)):
        assert source.read(uuid, *ALL)["gpu/util"] == util
        assert source.lost(uuid) is None
    assert library.calls["nvmlInitWithFlags"] == 4


def test_rates_are_means_since_the_last_reading(
    source: NvmlSource, gpu: FakeGpu, clock: FakeClock
) -> None:
    large = 2**32
    counters = [  # PCIe bytes, NVLink KiB, seconds later, and the expected rates
        (large, 0, 1.0, None, None),
        (large + 500, 100, 2.0, 500.0, 100 * 1024.0),
        (large + 500, 100, 1.0, 0.0, 0.0),
        (large + 100, 300, 1.0, None, 200 * 1024.0),  # reset: a new baseline
        (large + 400, 400, 4.0, 300.0, 100 * 1024.0),
        (2**63, 800, 1.0, None, 100 * 1024.0),  # no interconnect is that fast
    ]
    for pcie, nvlink, seconds, pcie_rate, nvlink_rate in counters:
        gpu.fields |= {197: pcie, 138: nvlink}
        values = source.read(A, SamplingTier.SLOW)
        assert (values.get("gpu/pcie_tx"), values.get("gpu/nvlink_tx")) == (pcie_rate, nvlink_rate)
        assert ("gpu/pcie_tx" in source.reasons(A)) is (pcie_rate is None)
        clock.now += seconds


def test_a_counter_that_may_wrap_between_two_readings_gives_no_rate(
    source: NvmlSource, gpu: FakeGpu, clock: FakeClock
) -> None:
    for counter in (1000, 2000):
        gpu.fields |= {197: counter, 198: 2**32 + counter}
        values = source.read(A, SamplingTier.SLOW)
        clock.now += 1
    assert source.reasons(A)["gpu/pcie_tx"] == MAY_WRAP
    assert values["gpu/pcie_rx"] == 1000


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("580.95.05", {269, 270, 271}),
        ("575.57.08", set()),
        ("x", set()),
    ],
)
def test_throttle_times_have_the_numbers_of_the_driver(
    library: FakeNvml, gpu: FakeGpu, clock: FakeClock, driver: str, expected: set[int]
) -> None:
    library.driver = driver
    gpu.fields |= dict.fromkeys((251, 252, 253), 7 * NS)
    source = NvmlSource(clock)
    values = source.read(A, *SamplingTier)
    assert {number for number in library.asked_fields if number in range(251, 274)} == expected
    assert ("gpu/throttle_brake" in values) is bool(expected)


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
    [(9, "not loaded", True), (18, "restart", False), (999, "Unknown Error", True)],
)
def test_no_driver_is_one_sentence_and_looked_for_again_after_30_s(
    library: FakeNvml, clock: FakeClock, code: int, words: str, opens: bool
) -> None:
    library.errors = {"nvmlInitWithFlags": code}
    source = open_source(clock)
    assert isinstance(source, NullSource)
    assert words in source.reason
    assert (source.devices(), source.read(A, *ALL), source.lost(A)) == ([], {}, None)
    library.errors = {}
    clock.now += 29
    assert isinstance(open_source(clock), NullSource)
    clock.now += 2
    assert isinstance(open_source(clock), NvmlSource) is opens


def test_no_library_a_foreign_package_and_no_gpu_are_a_reason(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as foreign:
        foreign.delattr(pynvml, "_nvmlGetFunctionPointer")
        assert "nvidia-ml-py" in str(open_source().reason)
    install(monkeypatch, FakeNvml())
    assert "no GPU" in str(open_source().reason)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", _raise(OSError("libnvidia-ml.so.1")))
    monkeypatch.setattr(nvml, "_opened", {})
    assert "libnvidia-ml" in str(open_source().reason)
