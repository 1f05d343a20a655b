"""Properties, MIG instances, processes and activity of the NVML source over a fake library."""

from __future__ import annotations

import math
import os
import random

import pynvml
import pytest

from stepscope.gpu.device_info import DeviceProperties
from stepscope.gpu.gpm import BEFORE_HOPPER, ONLY_ROOT, SHARES
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NOT_BY_GPU, PERMISSION, RETRY_S
from stepscope.gpu.nvml_queries import KEYS, ONE_READING, SamplingTier
from stepscope.gpu.processes import GRAPHICS_S, NOT_LISTED, GpuProcess
from stepscope.gpu.source import NvmlSource
from tests.support.fake_nvml import (
    GIB,
    PLAIN,
    FakeClock,
    FakeGpu,
    FakeNvml,
    FakeProcess,
    install,
)

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
    assert (facts.uuid, facts.nvml_index) == (B, 1)
    assert (facts.pci_bus_id, facts.cuda_version) == ("00000000:17:00.0", "12.8")
    assert (facts.power_limit_default, facts.temp_slowdown) == (650.0, 92)
    assert (facts.pcie_gen, facts.pcie_width, facts.pcie_max_width) == (4, 8, 16)


def test_missing_facts_are_none_and_a_lost_gpu_keeps_the_last(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu
) -> None:
    library.missing = {"nvmlSystemGetCudaDriverVersion_v2"}
    names = ("PciInfo_v3", "PowerManagementDefaultLimit", "TemperatureThreshold")
    gpu.errors = {f"nvmlDeviceGet{name}": 4 for name in names}
    facts = facts_of(source)
    assert (facts.cuda_version, facts.pci_bus_id, facts.pcie_gen) == (None, None, 4)
    assert (facts.power_limit_default, facts.temp_slowdown) == (None, None)
    gpu.link = (5, 16)
    gpu.errors = {}
    facts = facts_of(source)
    assert (facts.power_limit_default, facts.pcie_gen) == (650.0, 5), "of now"
    gpu.errors = {"nvmlDeviceGetUtilizationRates": 15, "nvmlDeviceGetHandleByUUID": 15}
    source.read(A, SamplingTier.FAST)
    assert source.facts(A) == facts
    assert source.facts("GPU-cccc") is None


@pytest.fixture
def divided(library: FakeNvml, gpu: FakeGpu, clock: FakeClock) -> NvmlSource:
    gpu.mig = 1
    refused = ("TotalEnergyConsumption", "MigMode")
    instance = FakeGpu(SLICE, name="NVIDIA Test 80GB MIG 1g.10gb", total=10 * GIB, parent=A)
    instance.errors = {f"nvmlDeviceGet{name}": 3 for name in refused}
    instance.field_errors = {83: 3}
    library.gpus.append(instance)
    return NvmlSource(clock)


def test_instances_have_their_parents_number_and_their_own_memory(divided: NvmlSource) -> None:
    assert [info.uuid for info in divided.devices()] == [A, B]
    (info,) = divided.instances(A)
    assert (info.uuid, info.name, info.nvml_index) == (SLICE, "NVIDIA Test 80GB MIG 1g.10gb", 0)
    assert (info.memory_total, info.mig) == (10 * GIB, False)
    assert divided.instances(B) == divided.instances("GPU-cccc") == []
    facts, parent = facts_of(divided, SLICE), facts_of(divided)
    assert (facts.parent_uuid, facts.mig_profile) == (A, "1g.10gb")
    assert (parent.mig, parent.parent_uuid) == (True, None)
    assert divided.read(SLICE, *SamplingTier)["gpu/mem_total"] == 10.0 * GIB
    assert divided.reasons(SLICE)["gpu/energy"] == NOT_BY_GPU


def test_processes_have_memory_and_kind(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    assert source.processes(A) == ()
    gpu.processes = [FakeProcess(ME, 5), FakeProcess(4_000_000, None, graphics=True)]
    clock.now += GRAPHICS_S
    assert [(one.pid, one.memory, one.kind, one.yours) for one in listed(source)] == [
        (ME, 5, "compute", True),
        (4_000_000, None, "graphics", False),
    ]
    asked = library.calls["nvmlDeviceGetGraphicsRunningProcesses_v3"]
    for _ in range(2 * int(GRAPHICS_S)):
        source.processes(A)
        clock.now += 1
    assert library.calls["nvmlDeviceGetGraphicsRunningProcesses_v3"] == asked + 2
    library.missing = {LISTS[0]}
    assert [one.pid for one in listed(source)] == [ME, 4_000_000], "by the older call"


LISTS = [f"nvmlDeviceGetComputeRunningProcesses_v{version}" for version in (3, 2)]


@pytest.mark.parametrize(
    ("code", "reason", "calls"),
    [(3, NOT_LISTED, 1), (4, PERMISSION, 1), (13, NOT_BY_DRIVER, 1), (999, "error: ", 3)],
)
def test_a_list_that_the_driver_hides_is_none_with_its_reason(
    source: NvmlSource, library: FakeNvml, clock: FakeClock, code: int, reason: str, calls: int
) -> None:
    library.errors = dict.fromkeys(LISTS, code)
    for _ in range(3):
        assert source.processes(A) is None
        assert source.reasons(A)["processes"].startswith(reason)
        clock.now += RETRY_S
    assert library.calls[LISTS[0]] == calls


BUSY = {2: 81.0, 3: 44.5, 5: math.nan, 10: 30.0, 20: 3.0, 21: 4.0, 60: 5.0, 61: 6.0}


def test_activity_is_the_mean_between_two_samples_that_take_turns(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.activity = BUSY
    assert "gpu/sm_active" not in source.read(A, SamplingTier.MEDIUM)
    assert source.reasons(A)["gpu/sm_active"] == ONE_READING
    clock.now += 0.05
    source.read(A, SamplingTier.MEDIUM)
    assert library.calls["nvmlGpmSampleGet"] == 1, "samples are a tenth of a second apart"
    for _ in range(3):
        clock.now += 0.5
        values = source.read(A, SamplingTier.MEDIUM)
    assert (values["gpu/sm_active"], values["gpu/sm_occupancy"]) == (81.0, 44.5)
    assert "gpu/tensor_active" not in values, "NaN"
    assert set(source.reasons(A)) & set(SHARES) == {"gpu/tensor_active"}
    assert library.compared == [(2, 1), (1, 2), (2, 1)]
    assert library.calls["nvmlGpmSampleAlloc"] == 2
    clock.now += 100
    assert "gpu/sm_active" not in source.read(A, SamplingTier.MEDIUM), "over a break"


def test_an_instances_activity_is_that_of_its_parents_counters(
    divided: NvmlSource, library: FakeNvml, clock: FakeClock
) -> None:
    library.gpus[0].activity = {2: 40.0}
    divided.read(SLICE, SamplingTier.MEDIUM)
    clock.now += 0.5
    assert divided.read(SLICE, SamplingTier.MEDIUM)["gpu/sm_active"] == 40.0
    assert {number for _, number in library.sampled} == {9}
    assert library.sampled_gpu is library.gpus[0]


def test_links_have_their_rates_from_the_activity_counters_or_from_byte_counters(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.activity = BUSY

    def read() -> dict[str, float]:
        for number in (197, 198, 138, 139):
            gpu.fields[number] += 1000
        clock.now += 0.2
        return source.read(A, *SamplingTier)

    for _ in range(3):
        read()
    library.asked_fields.clear()
    values = read()
    assert not {197, 198, 138, 139} & set(library.asked_fields), "they take longer"
    assert values["gpu/pcie_tx"] == round(BUSY[20] * 2**20, -3)
    assert (values["gpu/nvlink_rx"], values["gpu/nvlink_tx"]) == (5_243_000, 6_291_000)
    source = NvmlSource(clock, reads_activity=False)
    read()
    values = read()
    assert (values["gpu/pcie_tx"], values["gpu/nvlink_rx"]) == (5000.0, 5000.0 * 1024)
    assert not {*SHARES} & set(source.reasons(A))


@pytest.mark.parametrize(
    ("function", "code", "reason", "calls"),
    [
        ("nvmlGpmQueryDeviceSupport", 3, BEFORE_HOPPER, 1),
        ("nvmlGpmSampleGet", 4, ONLY_ROOT, 1),
    ],
)
def test_activity_follows_the_error_rule(
    source: NvmlSource,
    library: FakeNvml,
    gpu: FakeGpu,
    clock: FakeClock,
    function: str,
    code: int,
    reason: str,
    calls: int,
) -> None:
    gpu.activity = BUSY
    gpu.errors = {function: code}
    for _ in range(3):
        assert "gpu/temp" in source.read(A, SamplingTier.MEDIUM)
        assert source.reasons(A)["gpu/dram_active"].startswith(reason)
        clock.now += 0.5
    assert library.calls[function] == calls
    assert source.lost(A) is None


def test_a_shutdown_by_other_code_ends_the_buffers(
    source: NvmlSource, library: FakeNvml, gpu: FakeGpu, clock: FakeClock
) -> None:
    gpu.activity = BUSY
    source.read(A, SamplingTier.MEDIUM)
    library.errors = {"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_UNINITIALIZED}
    source.read(A, SamplingTier.FAST)
    library.errors = {}
    clock.now += 10
    source.read(A, SamplingTier.MEDIUM)
    assert [number for number, _ in library.sampled] == [2, 4]


CODES = (1, 2, 3, 4, 9, 13, 15, 18, 28, 999)


@pytest.mark.parametrize("seed", range(10))
def test_under_any_errors_each_gap_has_a_reason_and_nothing_is_raised(
    divided: NvmlSource, library: FakeNvml, clock: FakeClock, seed: int
) -> None:
    library.gpus[1].activity = BUSY
    library.gpus[1].processes = [FakeProcess(ME, None)]
    chance = random.Random(seed)
    functions = [f"nvmlDeviceGet{name}" for name in PLAIN]
    functions += [name[1:] for name in vars(FakeNvml) if name.startswith("_nvml")]
    functions.remove("nvmlErrorString")
    machine = MachineMonitor(lambda: divided, clock=clock)
    for _ in range(20):
        failing = chance.sample(functions, chance.randint(0, 8))
        library.errors = {name: chance.choice(CODES) for name in failing}
        library.missing = set(chance.sample(functions, chance.randint(0, 2)))
        clock.now += chance.choice((0.1, 0.5, 1.0, 6.0))
        for device in machine.poll().devices:
            assert device.values.keys() | device.missing.keys() >= KEYS | set(SHARES)
            assert all(device.missing.values())
