"""Static properties of a GPU: name, limits, thresholds, PCIe link and MIG mode."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pynvml

from stepscope.common.formatting import printable
from stepscope.gpu.nvml_device import call_or_none


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

    @property
    def mig_profile(self) -> str | None:
        """The profile of a MIG instance, such as 1g.10gb, which ends its name; else None."""
        before, found, after = self.name.rpartition(" MIG ")
        return after.strip() if found and before else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties(DeviceInfo):
    """Properties of a GPU or a MIG instance; None if the driver does not report them.

    Watts and °C. `pcie_gen` and `pcie_width` are the current values, which an idle GPU lowers.
    `parent_uuid` is that of an instance.
    """

    pci_bus_id: str | None
    cuda_version: str | None
    power_limit_default: float | None
    temp_slowdown: float | None
    pcie_gen: int | None
    pcie_width: int | None
    pcie_max_gen: int | None
    pcie_max_width: int | None
    parent_uuid: str | None


def properties(handle: Any, info: DeviceInfo) -> DeviceProperties:
    """Query all properties: about 10 calls.

    On Ada and newer the threshold may be missing: these GPUs have `gpu/temp_margin`.
    """
    pci = call_or_none(pynvml.nvmlDeviceGetPciInfo, handle)
    milliwatts = call_or_none(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    slowdown = call_or_none(
        pynvml.nvmlDeviceGetTemperatureThreshold,
        handle,
        pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    )
    return DeviceProperties(
        **asdict(info),
        pci_bus_id=None if pci is None else pci.busId,
        cuda_version=_cuda_version(),
        power_limit_default=None if milliwatts is None else milliwatts / 1e3,
        temp_slowdown=slowdown or None,  # NVML may return 0 for a missing one
        pcie_gen=call_or_none(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=call_or_none(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_gen=call_or_none(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_max_width=call_or_none(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        parent_uuid=parent_uuid(handle) if info.uuid.startswith("MIG-") else None,
    )


def is_divided(handle: Any) -> bool:
    """Return True for a GPU in MIG mode."""
    mode = call_or_none(pynvml.nvmlDeviceGetMigMode, handle)
    return mode is not None and bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def parent_uuid(handle: Any) -> str | None:
    """Return the UUID of the GPU of a MIG instance; None if the driver does not report it."""
    parent = call_or_none(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
    uuid: str | None = None if parent is None else call_or_none(pynvml.nvmlDeviceGetUUID, parent)
    return uuid


def _cuda_version() -> str | None:
    number = call_or_none(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
