"""Metrics of each GPU, one row per tick of the sampler."""

from __future__ import annotations

from stepscope.metrics.metric import MetricTable, Unit

DEVICES: MetricTable = {
    "gpu/util": (
        Unit.PERCENT,
        "GPU utilization",
        "Share of the driver's sample window (1/6 to 1 s) in which at least one kernel ran.",
    ),
    "gpu/mem_util": (
        Unit.PERCENT,
        "memory access",
        "Share of the sample window in which device memory was read or written.",
    ),
    "gpu/mem_used": (
        Unit.BYTES,
        "device used",
        "Device memory in use by all processes; older drivers add their own reserve.",
    ),
    "gpu/mem_total": (Unit.BYTES, "device total", "Device memory installed."),
    "gpu/temp": (Unit.CELSIUS, "temperature", "GPU core temperature."),
    "gpu/power": (
        Unit.WATT,
        "power",
        "Board power now; a one-second average where only the older call works.",
    ),
    "gpu/power_limit": (Unit.WATT, "power limit", "Power limit in force."),
    "gpu/energy": (
        Unit.JOULE,
        "energy counter",
        "A counter: energy of the board since the driver was loaded, by all processes.",
    ),
    "gpu/sm_clock": (Unit.MEGAHERTZ, "SM clock", "Clock of the streaming multiprocessors."),
    "gpu/mem_clock": (Unit.MEGAHERTZ, "memory clock", "Clock of the device memory."),
    "gpu/throttle_reasons": (
        Unit.MASK,
        "throttle reasons",
        "Why clocks are below their maximum now, as a bit mask of NVML.",
    ),
    "gpu/mem_reserved": (
        Unit.BYTES,
        "driver reserve",
        "Device memory that the driver keeps for itself; not part of gpu/mem_used.",
    ),
    "gpu/mem_others": (
        Unit.BYTES,
        "other processes",
        "Memory of all other processes, once a second; run.json names them. Missing where the "
        "driver does not list all of them, as in a container.",
    ),
    "gpu/temp_mem": (
        Unit.CELSIUS,
        "memory temperature",
        "Temperature of the device memory; missing on most consumer GPUs.",
    ),
    "gpu/temp_margin": (
        Unit.CELSIUS,
        "thermal margin",
        "Degrees left until the GPU slows itself down.",
    ),
    "gpu/throttle_power": (
        Unit.SECOND,
        "power-capped time",
        "A counter: time in which the power cap lowered the clocks, normal at full load.",
    ),
    "gpu/throttle_sw_thermal": (
        Unit.SECOND,
        "thermal slowdown time (software)",
        "A counter: time in which the driver lowered the clocks because of heat; R575 and newer.",
    ),
    "gpu/throttle_hw_thermal": (
        Unit.SECOND,
        "thermal slowdown (hardware)",
        "A counter: time in which the hardware did so because of heat; R575 and newer.",
    ),
    "gpu/throttle_brake": (
        Unit.SECOND,
        "power brake time",
        "A counter: time in which an external power brake did so; R575 and newer.",
    ),
    "gpu/fan": (
        Unit.PERCENT,
        "fan",
        "Requested fan speed, as a share of its maximum; may exceed 100.",
    ),
    "gpu/pcie_tx": (
        Unit.BYTES_PER_SECOND,
        "PCIe sent",
        "Bytes a second from the GPU over PCIe, the mean of the last second. A counter of 32 bits "
        "that is read less often than four times a second gives none: it may have wrapped.",
    ),
    "gpu/pcie_rx": (
        Unit.BYTES_PER_SECOND,
        "PCIe received",
        "Bytes a second to the GPU over PCIe, as gpu/pcie_tx.",
    ),
    "gpu/nvlink_tx": (
        Unit.BYTES_PER_SECOND,
        "NVLink sent",
        "Bytes a second from the GPU over all its NVLinks.",
    ),
    "gpu/nvlink_rx": (
        Unit.BYTES_PER_SECOND,
        "NVLink received",
        "Bytes a second to the GPU over all its NVLinks.",
    ),
    "gpu/sm_active": (
        Unit.PERCENT,
        "SM active",
        "Share of time in which a streaming multiprocessor had work; Hopper and newer.",
    ),
    "gpu/sm_occupancy": (
        Unit.PERCENT,
        "SM occupancy",
        "Warps in flight as a share of the most that fit; Hopper and newer.",
    ),
    "gpu/tensor_active": (
        Unit.PERCENT,
        "tensor cores active",
        "Share of time in which the tensor cores were active; Hopper and newer.",
    ),
    "gpu/dram_active": (
        Unit.PERCENT,
        "DRAM active",
        "Share of the memory's bandwidth that was used; Hopper and newer.",
    ),
    "gpu/ecc_corrected": (
        Unit.COUNT,
        "corrected memory errors",
        "Memory errors since the driver was loaded that ECC has corrected.",
    ),
    "gpu/ecc_uncorrected": (
        Unit.COUNT,
        "uncorrected memory errors",
        "Memory errors since the driver was loaded that ECC could not correct.",
    ),
    "gpu/remapped_rows": (
        Unit.COUNT,
        "remapped rows",
        "Memory rows replaced by spare rows, over the GPU's life; Ampere and newer, not with MIG.",
    ),
    "gpu/remap_pending": (
        Unit.COUNT,
        "remap pending",
        "1 if rows will be replaced at the next reset of the GPU, else 0.",
    ),
    "gpu/remap_failed": (
        Unit.COUNT,
        "remap failed",
        "1 if a row could not be replaced for lack of spare rows, else 0.",
    ),
    "gpu/pcie_replays": (
        Unit.COUNT,
        "PCIe replays",
        "Packets retransmitted over PCIe; a rising number means a bad link.",
    ),
}
