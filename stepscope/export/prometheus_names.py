"""Prometheus names of the metrics that `stepscope exporter` serves."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.metrics import Unit

SCALES = {Unit.PERCENT: 0.01, Unit.MEGAHERTZ: 1e6, Unit.TERAFLOPS: 1e12}
"""Factors from stored to base units: ratio, hertz, FLOP/s. All others are stored in base units."""
HELP = {
    "gpu_throttle_seconds_total": "Time since driver load in which a reason lowered the clocks.",
    "gpu_ecc_errors_total": "Memory errors since driver load that ECC has found.",
    "gpu_fan_speed_ratio": "Requested fan speed, as a share of its maximum; may exceed 1.",
    "gpu_memory_reserved_bytes": "Device memory that the driver keeps, not part of that in use.",
    "gpu_pcie_transmit_bytes_per_second": "From the GPU over PCIe, mean of 0.2 s before a scrape.",
    "gpu_pcie_receive_bytes_per_second": "To the GPU over PCIe, mean of 0.2 s before a scrape.",
    "run_mfu_ratio": "Model FLOP/s as a share of the GPU's dense peak for the run's precision.",
    "run_process_cpu_ratio": "CPU time per wall time, without workers; 1 is one core.",
}
"""Where several metrics have one name, and where the stored metric has another unit."""


class ExportedMetric(NamedTuple):
    """Prometheus name, without the prefix `stepscope_`, and own labels of the metric `key`."""

    key: str
    name: str
    labels: dict[str, str]


def _table(text: str) -> tuple[ExportedMetric, ...]:
    rows = (entry.split(":") for entry in text.split())
    return tuple(
        ExportedMetric(key, name, dict(label.split("=") for label in labels))
        for key, name, *labels in rows
    )


# Metric:name, and :label=value where several metrics have one name.
GPU_METRICS = _table("""
    gpu/util:gpu_utilization_ratio gpu/mem_util:gpu_memory_utilization_ratio
    gpu/mem_used:gpu_memory_used_bytes gpu/mem_reserved:gpu_memory_reserved_bytes
    gpu/mem_total:gpu_memory_total_bytes gpu/temp:gpu_temperature_celsius
    gpu/temp_mem:gpu_memory_temperature_celsius gpu/temp_margin:gpu_temperature_margin_celsius
    gpu/fan:gpu_fan_speed_ratio gpu/power:gpu_power_watts gpu/power_limit:gpu_power_limit_watts
    gpu/energy:gpu_energy_joules_total gpu/sm_clock:gpu_sm_clock_hertz
    gpu/mem_clock:gpu_memory_clock_hertz
    gpu/throttle_power:gpu_throttle_seconds_total:reason=power_cap
    gpu/throttle_sw_thermal:gpu_throttle_seconds_total:reason=thermal_software
    gpu/throttle_hw_thermal:gpu_throttle_seconds_total:reason=thermal_hardware
    gpu/throttle_brake:gpu_throttle_seconds_total:reason=power_brake
    gpu/pcie_tx:gpu_pcie_transmit_bytes_per_second gpu/pcie_rx:gpu_pcie_receive_bytes_per_second
    gpu/nvlink_tx:gpu_nvlink_transmit_bytes_per_second
    gpu/nvlink_rx:gpu_nvlink_receive_bytes_per_second
    gpu/ecc_corrected:gpu_ecc_errors_total:type=corrected
    gpu/ecc_uncorrected:gpu_ecc_errors_total:type=uncorrected
    gpu/remapped_rows:gpu_remapped_rows gpu/pcie_replays:gpu_pcie_replays_total
""")
RUN_METRICS = _table("""
    train/loss:run_loss train/epoch:run_epoch train/lr:run_learning_rate
    train/grad_norm:run_gradient_norm val/loss:run_validation_loss
    val/accuracy:run_validation_accuracy_ratio
    perf/step_time:run_step_time_seconds perf/data_wait:run_data_wait_seconds
    perf/samples_per_sec:run_samples_per_second perf/tokens_per_sec:run_tokens_per_second
    perf/tflops:run_model_flops_per_second perf/mfu:run_mfu_ratio
    memory/allocated:run_memory_allocated_bytes memory/reserved:run_memory_reserved_bytes
    memory/peak_allocated:run_memory_peak_allocated_bytes
    memory/alloc_retries:run_allocation_retries_total memory/ooms:run_out_of_memory_errors_total
    process/rss:run_process_resident_bytes process/children_rss:run_workers_resident_bytes
    process/cpu:run_process_cpu_ratio comm/share:run_collective_time_ratio
""")
