"""Static properties of a GPU: name, limits, thresholds, PCIe link and MIG mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pynvml

from stepscope.common.formatting import printable
from stepscope.gpu.nvml_device import call_or_none

ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
"""NVML_DEVICE_ARCH_* (nvml.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Identity of a GPU, or of a MIG instance with its parent's `nvml_index`; memory in bytes."""

    uuid: str
    name: str
    nvml_index: int
    memory_total: int | None
    driver_version: str | None
    mig: bool  # A GPU in MIG mode.

    @property
    def short_uuid(self) -> str:
        """The first part of the UUID, which distinguishes GPUs, such as GPU-c0da5130."""
        return printable("-".join(self.uuid.split("-")[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties(DeviceInfo):
    """Properties of a GPU or a MIG instance; None if the driver does not report them.

    Bytes, watts, °C and MHz. `power_limit` is the enforced limit, `pcie_gen` and `pcie_width` the
    current values, which an idle GPU lowers. `parent_uuid` and `mig_profile` ("1g.10gb") are those
    of an instance.
    """

    pci_bus_id: str | None
    architecture: str | None
    cuda_version: str | None
    power_limit: float | None
    power_limit_default: float | None
    temp_slowdown: float | None
    temp_shutdown: float | None
    max_sm_clock: float | None
    max_mem_clock: float | None
    pcie_gen: int | None
    pcie_width: int | None
    pcie_max_gen: int | None
    pcie_max_width: int | None
    parent_uuid: str | None
    mig_profile: str | None


def properties(handle: Any, info: DeviceInfo) -> DeviceProperties:
    """Query all properties: about 20 calls.

    On Ada and newer the thresholds may be missing: these GPUs have `gpu/temp_margin`.
    """
    divided = is_divided(handle)
    if divided is not None:
        info = replace(info, mig=divided)
    pci = call_or_none(pynvml.nvmlDeviceGetPciInfo, handle)
    return DeviceProperties(
        **asdict(info),
        pci_bus_id=None if pci is None else pci.busId,
        architecture=ARCHITECTURES.get(call_or_none(pynvml.nvmlDeviceGetArchitecture, handle)),
        cuda_version=_cuda_version(),
        power_limit=_watts(handle, pynvml.nvmlDeviceGetEnforcedPowerLimit),
        power_limit_default=_watts(handle, pynvml.nvmlDeviceGetPowerManagementDefaultLimit),
        temp_slowdown=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        temp_shutdown=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        max_sm_clock=call_or_none(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        max_mem_clock=call_or_none(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        pcie_gen=call_or_none(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=call_or_none(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_gen=call_or_none(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_max_width=call_or_none(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        parent_uuid=parent_uuid(handle) if info.uuid.startswith("MIG-") else None,
        mig_profile=profile(info.name),
    )


def is_divided(handle: Any) -> bool | None:
    """Return True for a GPU in MIG mode; None if the driver does not report the mode."""
    mode = call_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def _watts(handle: Any, call: Callable[[Any], int]) -> float | None:
    milliwatts = call_or_none(call, handle)
    return None if milliwatts is None else milliwatts / 1e3


def profile(name: str) -> str | None:
    """Return the MIG profile at the end of an instance's name; None for a whole GPU."""
    before, found, after = name.rpartition(" MIG ")
    return after.strip() if found and before else None


def parent_uuid(handle: Any) -> str | None:
    """Return the UUID of the GPU of a MIG instance; None if the driver does not report it."""
    parent = call_or_none(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
    uuid: str | None = None if parent is None else call_or_none(pynvml.nvmlDeviceGetUUID, parent)
    return uuid


def _threshold(handle: Any, which: int) -> float | None:
    """Return a temperature threshold; None if missing, for which NVML may return 0."""
    return call_or_none(pynvml.nvmlDeviceGetTemperatureThreshold, handle, which) or None


def _cuda_version() -> str | None:
    number = call_or_none(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
