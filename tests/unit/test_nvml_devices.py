"""Facts, MIG instances, processes, activity and rates of the NVML source over a fake library."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from stepscope.gpu.device_info import DeviceProperties
from stepscope.gpu.gpm import BEFORE_HOPPER, NOT_ARMED, ONLY_ROOT, SHARES
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.nvml_device import NOT_BY_GPU, NOT_UNDER_WSL, PERMISSION
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.nvml_reader import ONE_READING
from stepscope.gpu.processes import NOT_LISTED, SM_S, GpuProcess
from stepscope.gpu.source import NvmlSource
from tests.support.fake_nvml import GIB, NS, FakeClock, FakeGpu, FakeNvml, FakeProcess, install

A, B, SLICE = "GPU-aaaa", "GPU-bbbb", "MIG-1111"
ME = os.getpid()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return install(monkeypatch, FakeNvml(FakeGpu(A), FakeGpu(B)))


@pytest.fixture
def gpu(library: FakeNvml) -> FakeGpu:
    return library.gpus[0]


@pytest.fixture
def source(library: FakeNvml, clock: FakeClock) -> NvmlSource:
    pynvml.nvmlInit()
    return NvmlSource(clock)


def facts_of(source: NvmlSource, uuid: str = A) -> DeviceProperties:
    """Return the facts of a GPU that has them."""
    facts = source.facts(uuid)
    assert facts is not None
    return facts


def listed(source: NvmlSource) -> tuple[GpuProcess, ...]:
    """Return the processes of a GPU that lists them."""
    found = source.processes(A)
    assert found is not None
    return found


def test_facts_say_what_does_not_change(source: NvmlSource) -> None:
    facts = facts_of(source, B)
    assert (facts.uuid, facts.nvml_index, facts.architecture) == (B, 1, "Hopper")
    assert (facts.pci_bus_id, facts.cuda_version) == ("00000000:17:00.0", "12.8")
    assert (facts.power_limit, facts.power_limit_default) == (700.0, 650.0)
    # A threshold of 0 is none.
    assert (facts.temp_shutdown, facts.temp_slowdown, facts.temp_max_operating) == (95, 92, None)
    assert (facts.max_sm_clock, facts.max_mem_clock) == (1980, 2619)
    assert (facts.pcie_gen, facts.pcie_width) == (4, 8)
    assert (facts.pcie_max_gen, facts.pcie_max_width) == (5, 16)
    assert (facts.mig, facts.parent_uuid, facts.mig_profile) == (False, None, None)


def test_missing_facts_are_none_and_a_lost_gpu_keeps_the_last(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu
) -> None:
    library.missing = {"nvmlDeviceGetArchitecture", "nvmlSystemGetCudaDriverVersion_v2"}
    gpu.errors = {"nvmlDeviceGetPciInfo_v3": 4, "nvmlDeviceGetEnforcedPowerLimit": 4}
    facts = facts_of(source)
    assert (facts.architecture, facts.cuda_version) == (None, None)
    assert (facts.pci_bus_id, facts.power_limit, facts.pcie_gen) == (None, None, 4)
    gpu.link, gpu.errors = (5, 16), {}
    facts = facts_of(source)
    assert (facts.power_limit, facts.pcie_gen) == (700.0, 5), "of now"
    gpu.errors = {"nvmlDeviceGetUtilizationRates": 15, "nvmlDeviceGetHandleByUUID": 15}
    source.read(A, SamplingTier.FAST)
    assert source.facts(A) == facts
    assert (source.processes(A), source.recovery_action(A)) == (None, None)
    assert source.facts("GPU-cccc") is None


@pytest.fixture
def divided(library: FakeNvml, gpu: FakeGpu, clock: FakeClock) -> NvmlSource:
    gpu.mig = 1
    refused = ("UtilizationRates", "TotalEnergyConsumption", "MigMode")
    instance = FakeGpu(SLICE, name="NVIDIA Test 80GB MIG 1g.10gb", total=10 * GIB, parent=A)
    instance.errors = {f"nvmlDeviceGet{name}": 3 for name in refused}
    instance.field_errors = {83: 3}
    library.gpus.append(instance)
    return NvmlSource(clock)


def test_instances_have_their_parents_number_and_their_own_memory(divided: NvmlSource) -> None:
    assert [info.uuid for info in divided.devices()] == [A, B]
    (info,) = divided.instances(A)
    assert (info.uuid, info.name, info.nvml_index) == (SLICE, "NVIDIA Test 80GB MIG 1g.10gb", 0)
    assert (info.memory_total, info.mig, divided.devices()[0].mig) == (10 * GIB, False, True)
    assert divided.instances(B) == divided.instances("GPU-cccc") == []
    facts, parent = facts_of(divided, SLICE), facts_of(divided)
    assert (facts.parent_uuid, facts.mig_profile, facts.nvml_index) == (A, "1g.10gb", 0)
    assert facts.memory_total == 10 * GIB
    assert (parent.mig, parent.parent_uuid, parent.mig_profile) == (True, None, None)
    assert divided.read(SLICE, *SamplingTier)["gpu/mem_total"] == 10.0 * GIB
    reasons = divided.reasons(SLICE)
    for key in ("gpu/util", "gpu/mem_util", "gpu/energy"):
        assert reasons[key] == "not supported on this GPU"


@pytest.mark.parametrize("mig", [0, 1])
def test_the_mig_mode_is_read_again_after_a_reset(
    divided: NvmlSource, gpu: FakeGpu, clock: FakeClock, mig: int
) -> None:
    gpu.mig = 1 - mig
    machine = MachineMonitor(lambda: divided, clock=clock, pause=lambda seconds: None)
    machine.look()
    gpu.errors = dict.fromkeys(("nvmlDeviceGetFieldValues", "nvmlDeviceGetHandleByUUID"), 15)
    gpu.mig = mig
    clock.now += 1
    assert machine.look().devices[0].lost
    gpu.errors = {}
    clock.now += 20
    device = machine.look().devices[0]
    assert (divided.devices()[0].mig, device.info.mig) == (mig == 1, mig == 1)
    assert len(device.instances) == mig
    gpu.errors = {"nvmlDeviceGetHandleByUUID": 15, "nvmlDeviceGetFieldValues": 15}
    divided.read(A, SamplingTier.MEDIUM)
    gpu.errors = {"nvmlDeviceGetMigMode": 999}
    clock.now += 20
    divided.read(A, SamplingTier.MEDIUM)
    assert divided.devices()[0].mig == (mig == 1), "not told is not off"


def test_an_instances_activity_is_asked_of_its_parent(
    divided: NvmlSource, library: FakeNvml, clock: FakeClock
) -> None:
    library.gpus[0].activity = {2: 40.0}
    divided.arm_gpm(True)
    divided.read(SLICE, SamplingTier.MEDIUM)
    clock.now += 0.5
    assert divided.read(SLICE, SamplingTier.MEDIUM)["gpu/sm_active"] == 40.0
    assert {number for _, number in library.sampled} == {9}
    assert library.sampled_gpu is library.gpus[0]


def test_processes_have_memory_kind_and_share(
    source: NvmlSource, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.processes = [
        FakeProcess(ME, 5, sm=30, stamp=10),
        FakeProcess(4_000_000, None, sm=20, stamp=11, graphics=True),
    ]
    assert [(one.pid, one.memory, one.kind, one.sm) for one in listed(source)] == [
        (ME, 5, "compute", None),
        (4_000_000, None, "graphics", None),
    ]
    gpu.processes[0].stamp = 20
    clock.now += SM_S
    source.processes(A)
    second = listed(source)
    assert [one.sm for one in second] == [30.0, 0.0], "kept until the next reading"
    assert [one.yours for one in second] == [True, False]
    clock.now += SM_S
    assert [one.sm for one in listed(source)] == [None, None], "nothing new"


def test_no_process_is_an_empty_list_and_hidden_ones_are_none(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu
) -> None:
    assert source.processes(A) == ()
    assert "processes" not in source.reasons(A)
    library.gpus[1].errors = {
        "nvmlDeviceGetComputeRunningProcesses_v3": 3,
        "nvmlDeviceGetComputeRunningProcesses_v2": 3,
    }
    for _ in range(3):
        assert source.processes(B) is None
    assert source.reasons(B)["processes"] == NOT_LISTED
    assert library.calls["nvmlDeviceGetComputeRunningProcesses_v3"] == 1 + 1


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("6.1.0-37-amd64", NOT_BY_GPU),
        ("5.15.153.1-microsoft-standard-WSL2", NOT_UNDER_WSL),
        ("4.4.0-19041-Microsoft", NOT_UNDER_WSL),
    ],
)
def test_under_wsl_a_value_that_is_not_supported_has_wsl_as_its_reason(
    library: FakeNvml, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, release: str, reason: str
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    library.errors = {
        "nvmlDeviceGetUtilizationRates": 3,
        "nvmlDeviceGetFanSpeed": 4,
        "nvmlDeviceGetComputeRunningProcesses_v3": 3,
        "nvmlDeviceGetComputeRunningProcesses_v2": 3,
    }
    pynvml.nvmlInit()
    source = NvmlSource(clock)
    values = source.read(A, *SamplingTier)
    assert source.processes(A) is None
    reasons = source.reasons(A)
    assert "gpu/util" not in values
    assert reasons["gpu/util"] == reason
    assert reasons["processes"] == (NOT_LISTED if reason == NOT_BY_GPU else reason)
    assert reasons["gpu/fan"] == PERMISSION


def test_an_older_driver_lists_processes_by_an_older_call(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    for _ in range(21):
        source.processes(A)
        clock.now += 1
    assert library.calls["nvmlDeviceGetGraphicsRunningProcesses_v3"] == 3, "every ten seconds"
    gpu.processes = [FakeProcess(ME, 5)]
    library.missing = {
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetProcessesUtilizationInfo",
    }
    assert [(one.pid, one.sm) for one in listed(source)] == [(ME, None)]


def test_a_recovery_action_is_in_words(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    for number, words in ((0, None), (1, "the GPU has to be reset"), (99, "action 99")):
        gpu.fields[230] = number
        assert source.recovery_action(A) == words
        assert source.recovery_action(B) is None
        clock.now += 10
    assert library.asked_fields.count(230) == 3 + 1, "a driver without it is asked once"


BUSY = {2: 81.0, 3: 44.5, 5: math.nan, 10: 30.0, 20: 3.0, 21: 4.0, 60: 5.0, 61: 6.0}


def test_activity_is_the_mean_between_two_samples_that_take_turns(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.activity = BUSY
    assert "gpu/sm_active" not in source.read(A, SamplingTier.MEDIUM)
    assert source.reasons(A)["gpu/sm_active"] == NOT_ARMED
    source.arm_gpm(True)
    assert "gpu/sm_active" not in source.read(A, SamplingTier.MEDIUM)
    assert source.reasons(A)["gpu/sm_active"] == ONE_READING
    clock.now += 0.05
    source.read(A, SamplingTier.MEDIUM)
    assert library.calls["nvmlGpmSampleGet"] == 1, "samples are a tenth of a second apart"
    for _ in range(3):
        clock.now += 0.5
        values = source.read(A, SamplingTier.MEDIUM)
    assert (values["gpu/sm_active"], values["gpu/sm_occupancy"]) == (81.0, 44.5)
    assert values["gpu/dram_active"] == 30.0
    assert "gpu/tensor_active" not in values, "NaN"
    assert set(source.reasons(A)) & set(SHARES) == {"gpu/tensor_active"}
    assert library.compared == [(1, 2), (2, 1), (1, 2)]
    assert library.calls["nvmlGpmSampleAlloc"] == 2


def test_links_have_their_rates_from_the_activity_counters_or_from_byte_counters(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.activity = BUSY
    gpu.field_errors = {138: 3, 139: 3, 202: 3, 204: 3}
    source.arm_gpm(True)

    def look() -> dict[str, float]:
        gpu.fields[197] += 1000
        gpu.fields[198] += 3000
        clock.now += 0.2
        return source.read(A, *SamplingTier)

    looks = [look() for _ in range(4)]
    library.asked_fields.clear()
    values = look()
    assert not {197, 198} & set(library.asked_fields), "they take longer, and are not asked then"
    assert values["gpu/pcie_tx"] == looks[-1]["gpu/pcie_tx"] == round(BUSY[20] * 2**20, -3)
    assert (values["gpu/nvlink_rx"], values["gpu/nvlink_tx"]) == (5_243_000, 6_291_000)
    assert not {"gpu/nvlink_rx", "gpu/pcie_rx"} & set(source.reasons(A))
    source.arm_gpm(False)
    rates = [look() for _ in range(3)][-1]
    assert (rates["gpu/pcie_tx"], rates["gpu/pcie_rx"]) == pytest.approx((5000.0, 15000.0))


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("nvmlGpmQueryDeviceSupport", 3, BEFORE_HOPPER),
        ("nvmlGpmSampleGet", 4, ONLY_ROOT),
        ("nvmlGpmSampleGet", 13, "not offered by this driver"),
        ("nvmlGpmSampleGet", 999, "error: "),
    ],
)
def test_the_first_failure_of_activity_ends_it(
    source: NvmlSource,
    library: FakeNvml,
    gpu: FakeGpu,
    clock: FakeClock,
    function: str,
    code: int,
    reason: str,
) -> None:
    gpu.activity, gpu.errors = BUSY, {function: code}
    source.arm_gpm(True)
    for _ in range(5):
        assert "gpu/temp" in source.read(A, SamplingTier.MEDIUM)
        clock.now += 0.5
    assert source.reasons(A)["gpu/dram_active"].startswith(reason)
    assert library.calls[function] == 1
    assert source.lost(A) is None
    assert library.gpm_freed == list(range(1, library.gpm_buffers + 1))


@pytest.mark.parametrize(("code", "freed"), [(15, [1, 2]), (1, [])], ids=["lost", "shut down"])
def test_buffers_are_given_back_unless_they_ended_with_nvml(
    source: NvmlSource,
    library: FakeNvml,
    gpu: FakeGpu,
    clock: FakeClock,
    code: int,
    freed: list[int],
) -> None:
    gpu.activity = BUSY
    source.arm_gpm(True)
    source.read(A, SamplingTier.MEDIUM)
    assert library.gpm_buffers == 2
    calls = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetHandleByUUID")
    library.errors = dict.fromkeys(calls, code)
    source.read(A, SamplingTier.FAST)
    library.errors = {}
    clock.now += 10
    source.read(A, SamplingTier.MEDIUM)
    assert (library.gpm_freed, library.gpm_buffers) == (freed, 4)


def test_who_arms_last_disarms(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.activity = BUSY
    for on in (True, True, False):
        source.arm_gpm(on)
    for _ in range(2):
        source.read(A, SamplingTier.MEDIUM)
        clock.now += 0.5
    assert library.calls["nvmlGpmMetricsGet"] == 1
    for on in (False, False):
        source.arm_gpm(on)
    source.read(A, SamplingTier.MEDIUM)
    assert library.calls["nvmlGpmSampleGet"] == 2
    assert source.reasons(A)["gpu/sm_active"] == NOT_ARMED
    clock.now += 100
    source.arm_gpm(True)
    assert "gpu/sm_active" not in source.read(A, SamplingTier.MEDIUM), (
        "the mean over the break is nothing"
    )
    clock.now += 0.5
    assert "gpu/sm_active" in source.read(A, SamplingTier.MEDIUM)


def test_byte_counters_are_watched_each_tick_and_told_once_a_second(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    seen: list[float] = []
    for tick in range(21):
        gpu.fields[198] = (2**32 - 5 * 10**8 + tick * 10**8) % 2**32
        gpu.fields[138] = tick * 100
        gpu.fields[197] += 2**32 if tick == 0 else 1000
        seen += [v for k, v in source.read(A, SamplingTier.FAST).items() if k == "gpu/pcie_rx"]
        if tick % 10 == 0:
            values = source.read(A, SamplingTier.SLOW)
            seen += [values[k] for k in ("gpu/pcie_rx", "gpu/nvlink_tx") if k in values]
        clock.now += 0.1
    assert seen == pytest.approx([1e9, 1000 * 1024, 1e9, 1000 * 1024])
    assert library.asked_fields.count(198) == 21
    assert library.asked_fields.count(197) == 1 + 3, "one of more than 32 bits once a second"
    assert values["gpu/pcie_tx"] == pytest.approx(10_000)


R580, R575 = {269, 270, 271}, {251, 252, 253}
DRIVERS = {"580.95.05": R580, "590.10": R580, "575.57.08": R575, "570.86.15": (), "nonsense": ()}


@pytest.mark.parametrize(("driver", "asked"), DRIVERS.items())
def test_throttle_times_have_the_numbers_of_the_driver(
    library: FakeNvml, gpu: FakeGpu, clock: FakeClock, driver: str, asked: Collection[int]
) -> None:
    library.driver = driver
    gpu.fields |= {251: 7 * NS, 252: 7 * NS, 253: 7 * NS}
    source = NvmlSource(clock)
    values = source.read(A, *SamplingTier)
    times = {number for number in library.asked_fields if number in range(251, 274)}
    assert times == set(asked)
    assert ("gpu/throttle_brake" in values) is bool(asked)
    if not asked:
        assert source.reasons(A)["gpu/throttle_brake"] == "not offered by this driver"


@pytest.mark.parametrize("error", [AttributeError("x"), pynvml.NVMLLibraryMismatchError("x"), None])
def test_a_binding_that_does_not_fit_backs_off(
    source: NvmlSource, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    real = pynvml.nvmlDeviceGetFieldValues

    def odd(handle: object, numbers: object) -> Any:
        if error is not None:
            raise error
        values = real(handle, numbers)
        values[0].valueType = 77
        return values

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", odd)
    values = source.read(A, SamplingTier.MEDIUM, SamplingTier.SLOW)
    assert values["gpu/temp"] == 51.0
    if isinstance(error, AttributeError):
        assert source.reasons(A)["gpu/energy"] == "error: AttributeError: x"
    elif error is not None:
        assert values["gpu/energy"] == 9000.0, "by the older call"
        assert source.reasons(A)["gpu/throttle_brake"] == "not offered by this driver"
    else:
        assert "unknown type 77" in source.reasons(A)["gpu/temp_mem"]


def test_a_slow_call_is_left_out_of_the_ticks_between(
    source: NvmlSource, library: FakeNvml, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pynvml.nvmlDeviceGetUtilizationRates

    def slow(handle: object) -> object:
        clock.now += 0.05
        return real(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", slow)
    for _ in range(100):
        assert "gpu/power" in source.read(A, SamplingTier.FAST)
        clock.now += 0.1
    assert library.calls["nvmlDeviceGetUtilizationRates"] == 12, "three, then one a second"


@pytest.mark.parametrize(("key", "rest_s"), [("gpu/energy", 2.0), ("gpu/temp_margin", 5.0)])
def test_what_costs_the_driver_a_millisecond_is_read_seldom(
    source: NvmlSource, clock: FakeClock, key: str, rest_s: float
) -> None:
    found = []
    for _ in range(21):
        found.append(key in source.read(A, SamplingTier.MEDIUM))
        assert key not in source.reasons(A)
        clock.now += 0.5
    assert [at for at, there in enumerate(found) if there] == list(range(0, 21, int(2 * rest_s)))
