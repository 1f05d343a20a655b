"""What is recorded of each GPU, once per tick of the sampler."""

from __future__ import annotations

import functools

from stepscope.metrics.metric import Metric, Stream, Unit

_device = functools.partial(Metric, Stream.DEVICES)

DEVICES: tuple[Metric, ...] = (
    _device(
        "gpu/util",
        Unit.PERCENT,
        "GPU utilization",
        "nvmlDeviceGetUtilizationRates.gpu",
        "Share of the driver's sample window in which at least one kernel ran; "
        "the driver refreshes it about 6 times a second. Not SM occupancy.",
    ),
    _device(
        "gpu/mem_util",
        Unit.PERCENT,
        "memory access",
        "nvmlDeviceGetUtilizationRates.memory",
        "Share of the sample window in which device memory was read or written.",
    ),
    _device(
        "gpu/mem_used",
        Unit.BYTES,
        "device used",
        "nvmlDeviceGetMemoryInfo_v2.used",
        "Device memory in use by all processes; older drivers add their own reserve.",
    ),
    _device(
        "gpu/mem_total",
        Unit.BYTES,
        "device total",
        "nvmlDeviceGetMemoryInfo.total",
        "Device memory installed.",
    ),
    _device(
        "gpu/temp",
        Unit.CELSIUS,
        "temperature",
        "nvmlDeviceGetTemperatureV",
        "GPU core temperature.",
    ),
    _device(
        "gpu/power",
        Unit.WATT,
        "power",
        "NVML_FI_DEV_POWER_INSTANT, else nvmlDeviceGetPowerUsage",
        "Board power now; a one-second average where only the older call works.",
    ),
    _device(
        "gpu/power_limit",
        Unit.WATT,
        "power limit",
        "nvmlDeviceGetEnforcedPowerLimit",
        "Power limit in force.",
    ),
    _device(
        "gpu/energy",
        Unit.JOULE,
        "energy counter",
        "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, else nvmlDeviceGetTotalEnergyConsumption",
        "Energy of the board since the driver was loaded, by all processes; only differences are "
        "meaningful.",
    ),
    _device(
        "gpu/sm_clock",
        Unit.MEGAHERTZ,
        "SM clock",
        "nvmlDeviceGetClockInfo(SM)",
        "Clock of the streaming multiprocessors.",
    ),
    _device(
        "gpu/mem_clock",
        Unit.MEGAHERTZ,
        "memory clock",
        "nvmlDeviceGetClockInfo(MEM)",
        "Clock of the device memory.",
    ),
    _device(
        "gpu/throttle_reasons",
        Unit.MASK,
        "throttle reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "Why clocks are below their maximum now, as a bit mask of NVML.",
    ),
    _device(
        "gpu/mem_reserved",
        Unit.BYTES,
        "driver reserve",
        "nvmlDeviceGetMemoryInfo_v2.reserved",
        "Device memory that the driver keeps for itself; not part of gpu/mem_used.",
    ),
    _device(
        "gpu/mem_others",
        Unit.BYTES,
        "other processes",
        "nvmlDeviceGetComputeRunningProcesses",
        "Device memory of all processes but this one, once a second; run.json names them. Missing "
        "where the driver does not list all who hold memory, as in a container.",
    ),
    _device(
        "gpu/temp_mem",
        Unit.CELSIUS,
        "memory temperature",
        "NVML_FI_DEV_MEMORY_TEMP",
        "Temperature of the device memory; most consumer GPUs do not tell.",
    ),
    _device(
        "gpu/temp_margin",
        Unit.CELSIUS,
        "thermal margin",
        "nvmlDeviceGetMarginTemperature",
        "Degrees left until the GPU slows itself down.",
    ),
    _device(
        "gpu/throttle_power",
        Unit.SECOND,
        "power-capped time",
        "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP",
        "Time since the driver was loaded in which the power cap lowered the clocks, which is "
        "normal at full load; only differences are meaningful.",
    ),
    _device(
        "gpu/throttle_sw_thermal",
        Unit.SECOND,
        "thermal slowdown time (software)",
        "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
        "Time in which the driver lowered the clocks because of heat; only differences are "
        "meaningful. Drivers before R575 do not tell.",
    ),
    _device(
        "gpu/throttle_hw_thermal",
        Unit.SECOND,
        "thermal slowdown (hardware)",
        "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
        "Time in which the hardware lowered the clocks because of heat; only differences are "
        "meaningful. Drivers before R575 do not tell.",
    ),
    _device(
        "gpu/throttle_brake",
        Unit.SECOND,
        "power brake time",
        "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
        "Time in which an external power brake lowered the clocks; only differences are "
        "meaningful. Drivers before R575 do not tell.",
    ),
    _device(
        "gpu/fan",
        Unit.PERCENT,
        "fan",
        "nvmlDeviceGetFanSpeed",
        "Speed that the fan is asked for, as a share of its maximum; may exceed 100.",
    ),
    _device(
        "gpu/pcie_tx",
        Unit.BYTES_PER_SECOND,
        "PCIe sent",
        "NVML_FI_DEV_PCIE_COUNT_TX_BYTES, or GPM",
        "Bytes a second from the GPU over PCIe, the mean of the last second. A counter of 32 bits "
        "that is read less often than four times a second gives none: it may have wrapped.",
    ),
    _device(
        "gpu/pcie_rx",
        Unit.BYTES_PER_SECOND,
        "PCIe received",
        "NVML_FI_DEV_PCIE_COUNT_RX_BYTES, or GPM",
        "Bytes a second to the GPU over PCIe, as gpu/pcie_tx.",
    ),
    _device(
        "gpu/nvlink_tx",
        Unit.BYTES_PER_SECOND,
        "NVLink sent",
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, or GPM",
        "Bytes a second from the GPU over all its NVLinks.",
    ),
    _device(
        "gpu/nvlink_rx",
        Unit.BYTES_PER_SECOND,
        "NVLink received",
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, or GPM",
        "Bytes a second to the GPU over all its NVLinks.",
    ),
    _device(
        "gpu/sm_active",
        Unit.PERCENT,
        "SM active",
        "nvmlGpmMetricsGet",
        "Share of time, over all streaming multiprocessors, in which one had work; Hopper and "
        "newer.",
    ),
    _device(
        "gpu/sm_occupancy",
        Unit.PERCENT,
        "SM occupancy",
        "nvmlGpmMetricsGet",
        "Warps in flight as a share of the most that fit; Hopper and newer.",
    ),
    _device(
        "gpu/tensor_active",
        Unit.PERCENT,
        "tensor cores active",
        "nvmlGpmMetricsGet",
        "Share of time in which the tensor cores worked, over all multiprocessors; Hopper and "
        "newer.",
    ),
    _device(
        "gpu/dram_active",
        Unit.PERCENT,
        "DRAM active",
        "nvmlGpmMetricsGet",
        "Share of the memory's bandwidth that was used; Hopper and newer.",
    ),
    _device(
        "gpu/ecc_corrected",
        Unit.COUNT,
        "corrected memory errors",
        "nvmlDeviceGetTotalEccErrors",
        "Memory errors since the driver was loaded that ECC has corrected.",
    ),
    _device(
        "gpu/ecc_uncorrected",
        Unit.COUNT,
        "uncorrected memory errors",
        "nvmlDeviceGetTotalEccErrors",
        "Memory errors since the driver was loaded that ECC could not correct.",
    ),
    _device(
        "gpu/remapped_rows",
        Unit.COUNT,
        "remapped rows",
        "nvmlDeviceGetRemappedRows",
        "Rows of the device memory that were replaced by spare ones, over the GPU's life; Ampere "
        "and newer, not with MIG.",
    ),
    _device(
        "gpu/remap_pending",
        Unit.COUNT,
        "remap pending",
        "nvmlDeviceGetRemappedRows",
        "1 if rows are to be replaced at the next reset of the GPU, else 0.",
    ),
    _device(
        "gpu/remap_failed",
        Unit.COUNT,
        "remap failed",
        "nvmlDeviceGetRemappedRows",
        "1 if a row could once not be replaced, for lack of spare ones, else 0.",
    ),
    _device(
        "gpu/pcie_replays",
        Unit.COUNT,
        "PCIe replays",
        "nvmlDeviceGetPcieReplayCounter",
        "Packets that had to be sent again over PCIe; a number that rises means a bad link.",
    ),
)
