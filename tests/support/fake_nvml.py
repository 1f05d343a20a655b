"""A pure-Python NVML library for the real pynvml to call.

Fair because pynvml only looks a function up on `pynvml.nvmlLib`, calls it with ctypes values and
checks the returned code: its structures, unit members, error classes and missing symbols are the
real ones. Not covered: timing, threads inside the driver, and what a given GPU really answers.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

from stepscope.gpu import source

GIB = 2**30
NS = 10**9


FIELDS = {
    82: 47,  # memory temperature
    74: 5 * NS,  # held by power, then heat (software, hardware) and brake; R580's numbers
    269: 4 * NS,
    270: 3 * NS,
    271: 2 * NS,
    197: 2**32 + 10_000,  # PCIe, bytes
    198: 2**32 + 20_000,
    138: 300,  # NVLink, KiB
    139: 400,
}


@dataclass
class FakeClock:
    """Moves only when told; `wall` is the same moment in epoch seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeProcess:
    """One process on a GPU."""

    pid: int
    memory: int | None = GIB
    graphics: bool = False


@dataclass
class FakeGpu:
    """One GPU, or a MIG instance ("MIG-…"), which NVML does not count among its GPUs.

    `fields` are values by field id; power and energy are those below. `activity` holds GPM metrics
    by number. `errors` maps an NVML function to its return code, `field_errors` a field id.
    """

    uuid: str
    name: str = "NVIDIA Test 80GB"
    util: int = 37
    total: int = 80 * GIB
    used: int = 3 * GIB
    reserved: int = GIB // 2
    power_mw: int = 312_500
    energy_mj: int = 9_000_000
    temp: int = 51
    sm_clock: int = 1980
    reasons: int = 0
    mig: int = 0
    fields: dict[int, int] = field(default_factory=lambda: dict(FIELDS))
    link: tuple[int, int] = (4, 8)
    processes: list[FakeProcess] = field(default_factory=list)
    activity: dict[int, float] = field(default_factory=dict)
    parent: str | None = None
    errors: dict[str, int] = field(default_factory=dict)
    field_errors: dict[int, int] = field(default_factory=dict)


PLAIN: dict[str, Callable[[FakeGpu], int]] = {
    "MigMode": lambda gpu: gpu.mig,
    "PowerUsage": lambda gpu: 300_000,
    "EnforcedPowerLimit": lambda gpu: 700_000,
    "TotalEnergyConsumption": lambda gpu: gpu.energy_mj,
    "CurrentClocksEventReasons": lambda gpu: gpu.reasons,
    "CurrentClocksThrottleReasons": lambda gpu: gpu.reasons,
    "FanSpeed": lambda gpu: 30,
    "PcieReplayCounter": lambda gpu: 4,
    "PowerManagementDefaultLimit": lambda gpu: 650_000,
    "CurrPcieLinkGeneration": lambda gpu: gpu.link[0],
    "CurrPcieLinkWidth": lambda gpu: gpu.link[1],
    "MaxPcieLinkGeneration": lambda gpu: 5,
    "MaxPcieLinkWidth": lambda gpu: 16,
    "MaxMigDeviceCount": lambda gpu: 7,
    "GpuInstanceId": lambda gpu: 9,
}
"""Functions nvmlDeviceGet… with one value, which their first argument gets."""


class FakeNvml:
    """The library object: `missing` symbols, library-wide `errors`, and `calls` counted by name."""

    driver = "580.95.05"

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.asked_fields: list[int] = []
        self.gpm_buffers = 0
        self.sampled: list[tuple[int, int | None]] = []
        self.compared: list[tuple[int | None, int | None]] = []
        self.registered: list[str] = []
        self.xids: list[tuple[str, int, int] | int] = []
        self.missing: set[str] = set()
        self.errors: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., int]:
        plain = PLAIN.get(name.removeprefix("nvmlDeviceGet"))
        body = getattr(FakeNvml, f"_{name}", None)
        if (body is None and plain is None) or name in self.missing:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls[name] += 1
            if name in self.errors:
                return self.errors[name]
            if args and isinstance(args[0], pynvml.c_nvmlDevice_t):
                gpu = self.gpus[(ctypes.c_void_p.from_buffer(args[0]).value or 0) - 1]
                if name not in gpu.errors and plain is not None:
                    args[1]._obj.value = plain(gpu)
                    return 0
                return gpu.errors.get(name) or int(body(self, gpu, *args[1:]) or 0)
            return int(body(self, *args) or 0)

        return call

    def _hand_out(self, gpu: FakeGpu, handle: Any) -> None:
        """Set a pointer to a handle, as `byref` makes it."""
        ctypes.c_void_p.from_buffer(handle._obj).value = self.gpus.index(gpu) + 1

    def _nvmlInitWithFlags(self, flags: int) -> None: ...

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> None:
        text.value = self.driver.encode()

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = sum(not gpu.uuid.startswith("MIG-") for gpu in self.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        gpu: FakeGpu = self.gpus[index.value]
        self._hand_out(gpu, handle)
        return gpu.errors.get("nvmlDeviceGetHandleByIndex_v2", 0)

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        for gpu in self.gpus:
            if gpu.uuid == uuid.value.decode():
                self._hand_out(gpu, handle)
                return gpu.errors.get("nvmlDeviceGetHandleByUUID", 0)
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlDeviceGetUUID(self, gpu: FakeGpu, text: Any, size: Any) -> None:
        text.value = gpu.uuid.encode()

    def _nvmlDeviceGetName(self, gpu: FakeGpu, text: Any, size: Any) -> None:
        text.value = gpu.name.encode()

    def _nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu, rates: Any) -> None:
        rates._obj.gpu, rates._obj.memory = gpu.util, 12

    def _nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, memory: Any) -> None:
        memory._obj.total, memory._obj.used = gpu.total, gpu.used + gpu.reserved

    def _nvmlDeviceGetMemoryInfo_v2(self, gpu: FakeGpu, memory: Any) -> None:
        memory._obj.total, memory._obj.used = gpu.total, gpu.used
        memory._obj.reserved = gpu.reserved

    def _nvmlDeviceGetFieldValues(self, gpu: FakeGpu, count: Any, values: Any) -> None:
        known = {186: gpu.power_mw, 83: gpu.energy_mj} | gpu.fields
        for value in values._obj:
            self.asked_fields.append(value.fieldId)
            missing = 0 if value.fieldId in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.nvmlReturn = gpu.field_errors.get(value.fieldId, missing)
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = known.get(value.fieldId, 0)

    def _nvmlDeviceGetTemperatureV(self, gpu: FakeGpu, temperature: Any) -> None:
        temperature._obj.temperature = gpu.temp

    def _nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: Any, temperature: Any) -> None:
        temperature._obj.value = gpu.temp

    def _nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: Any, clock: Any) -> None:
        clock._obj.value = 3201 if kind.value == pynvml.NVML_CLOCK_MEM else gpu.sm_clock

    def _nvmlDeviceGetMarginTemperature(self, gpu: FakeGpu, margin: Any) -> None:
        margin._obj.marginTemperature = 36

    def _nvmlDeviceGetTotalEccErrors(
        self, gpu: FakeGpu, kind: Any, counter: Any, count: Any
    ) -> None:
        count._obj.value = {0: 7, 1: 0}[kind.value]

    def _nvmlDeviceGetRemappedRows(self, gpu: FakeGpu, *rows: Any) -> None:
        for one, value in zip(rows, (2, 1, 1, 0), strict=True):
            one._obj.value = value

    # --- facts and MIG

    def _nvmlDeviceGetPciInfo_v3(self, gpu: FakeGpu, info: Any) -> None:
        info._obj.busId = b"00000000:17:00.0"

    def _nvmlDeviceGetTemperatureThreshold(self, gpu: FakeGpu, which: Any, value: Any) -> None:
        value._obj.value = {pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 92}[which.value]

    def _nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> None:
        version._obj.value = 12080

    def _instances(self, gpu: FakeGpu) -> list[FakeGpu]:
        return [one for one in self.gpus if one.parent == gpu.uuid]

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: Any, handle: Any) -> int:
        instances = self._instances(gpu)
        at = index.value - 1  # the first number is one that no instance has
        if not 0 <= at < len(instances):
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        self._hand_out(instances[at], handle)
        return 0

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu, handle: Any) -> int:
        found = [one for one in self.gpus if one.uuid == gpu.parent]
        if not found:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._hand_out(found[0], handle)
        return 0

    # --- processes

    def _listed(self, gpu: FakeGpu, count: Any, room: Any, graphics: bool) -> int:
        found = [one for one in gpu.processes if one.graphics is graphics]
        count._obj.value = len(found)
        if found and room is None:
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for entry, one in zip(room or (), found, strict=False):
            entry.pid = one.pid
            entry.usedGpuMemory = 2**64 - 1 if one.memory is None else one.memory
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: FakeGpu, count: Any, room: Any) -> int:
        return self._listed(gpu, count, room, graphics=False)

    _nvmlDeviceGetComputeRunningProcesses_v2 = _nvmlDeviceGetComputeRunningProcesses_v3

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu: FakeGpu, count: Any, room: Any) -> int:
        return self._listed(gpu, count, room, graphics=True)

    # --- activity: a sample is a number, counted up

    def _nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu, support: Any) -> None:
        support._obj.isSupportedDevice = bool(gpu.activity)

    def _nvmlGpmSampleAlloc(self, sample: Any) -> None:
        self.gpm_buffers += 1
        ctypes.c_void_p.from_buffer(sample._obj).value = self.gpm_buffers

    def _nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> None:
        self.sampled.append((ctypes.cast(sample, ctypes.c_void_p).value or 0, None))
        self.sampled_gpu = gpu

    def _nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance: Any, sample: Any) -> None:
        number = instance if isinstance(instance, int) else instance.value
        self.sampled.append((ctypes.cast(sample, ctypes.c_void_p).value or 0, number))
        self.sampled_gpu = gpu

    def _nvmlGpmMetricsGet(self, question: Any) -> None:
        asked = question._obj
        first, second = (
            ctypes.cast(one, ctypes.c_void_p).value for one in (asked.sample1, asked.sample2)
        )
        self.compared.append((first, second))
        for metric in asked.metrics[: asked.numMetrics]:
            value = self.sampled_gpu.activity.get(metric.metricId)
            metric.nvmlReturn = 0 if value is not None else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = value or 0.0

    # --- events: those of `self.xids`, then a timeout

    def _nvmlEventSetCreate(self, events: Any) -> None: ...

    def _nvmlEventSetFree(self, events: Any) -> None: ...

    def _nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: Any, events: Any) -> None:
        self.registered.append(gpu.uuid)

    def _nvmlEventSetWait_v2(self, events: Any, data: Any, timeout: Any) -> int:
        if not self.xids:
            time.sleep(0.001)
            return int(pynvml.NVML_ERROR_TIMEOUT)
        what = self.xids.pop(0)
        if isinstance(what, int):
            return what
        uuid, code, kind = what
        handle = pynvml.c_nvmlDevice_t()
        self._hand_out(next(one for one in self.gpus if one.uuid == uuid), ctypes.byref(handle))
        data._obj.device = handle
        data._obj.eventType, data._obj.eventData = kind, code
        data._obj.gpuInstanceId = 0xFFFFFFFF
        return 0

    def _nvmlErrorString(self, code: int) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> FakeNvml:
    """Put the library under pynvml and forget the functions and sources of an earlier one."""
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(source, "_opened", {})
    return library
