"""Static properties of a GPU: name, limits, thresholds, PCIe link and MIG mode."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pynvml

from stepscope.common.formatting import printable
from stepscope.gpu.nvml_device import static

_NAMES = "Kepler Maxwell Pascal Volta Turing Ampere Ada Hopper Blackwell"
ARCHITECTURES = dict(enumerate(_NAMES.split(), 2)) | {13: "Rubin"}  # NVML_DEVICE_ARCH_* (nvml.h).


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
    temp_max_operating: float | None
    max_sm_clock: float | None
    max_mem_clock: float | None
    pcie_gen: int | None
    pcie_width: int | None
    pcie_max_gen: int | None
    pcie_max_width: int | None
    parent_uuid: str | None
    mig_profile: str | None


def describe(handle: Any, info: DeviceInfo) -> DeviceProperties:
    """Query all properties: about 20 calls.

    On Ada and newer the thresholds may be missing: these GPUs have `gpu/temp_margin`.
    """
    pci = static(pynvml.nvmlDeviceGetPciInfo, handle)
    return DeviceProperties(
        **asdict(info),
        pci_bus_id=None if pci is None else pci.busId,
        architecture=ARCHITECTURES.get(static(pynvml.nvmlDeviceGetArchitecture, handle)),
        cuda_version=_cuda_version(),
        power_limit=_watts(static(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        power_limit_default=_watts(static(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        temp_slowdown=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        temp_shutdown=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        temp_max_operating=_threshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
        max_sm_clock=static(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        max_mem_clock=static(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        pcie_gen=static(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=static(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_gen=static(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_max_width=static(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        parent_uuid=parent_uuid(handle) if info.uuid.startswith("MIG-") else None,
        mig_profile=profile(info.name),
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def profile(name: str) -> str | None:
    """Return the MIG profile at the end of an instance's name; None for a whole GPU."""
    before, found, after = name.rpartition(" MIG ")
    return after.strip() if found and before else None


def parent_uuid(handle: Any) -> str | None:
    """Return the UUID of the GPU of a MIG instance; None if the driver does not report it."""
    parent = static(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
    uuid: str | None = None if parent is None else static(pynvml.nvmlDeviceGetUUID, parent)
    return uuid


def _threshold(handle: Any, which: int) -> float | None:
    """Return a temperature threshold; None if missing, for which NVML may return 0."""
    return static(pynvml.nvmlDeviceGetTemperatureThreshold, handle, which) or None


def _cuda_version() -> str | None:
    number = static(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
