"""The Hardware page as rows of tables. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dashboard.charts import figures
from dashboard.charts.figures import Json
from dashboard.machine.machine_poller import PastReading
from stepscope.common.formatting import format_bytes, format_duration, format_energy
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.gpu.device_info import DeviceInfo
from stepscope.gpu.machine_state import DeviceState, HostState, MachineState
from stepscope.gpu.processes import GpuProcess

Row = dict[str, Any]  # Values by column title.

LEVELS = {"ok": "✓", "notice": "i", "warning": "▲", "critical": "✕"}
VALUES = {  # The metrics of a GPU by group.
    "Activity": (
        *("gpu/util", "gpu/mem_util", "gpu/sm_active", "gpu/sm_occupancy"),
        *("gpu/tensor_active", "gpu/dram_active"),
    ),
    "Memory": ("gpu/mem_used", "gpu/mem_total", "gpu/mem_reserved"),
    "Heat and power": (
        *("gpu/temp", "gpu/temp_mem", "gpu/temp_margin"),
        *("gpu/power", "gpu/power_limit", "gpu/energy", "gpu/fan"),
    ),
    "Clocks": (
        *("gpu/sm_clock", "gpu/mem_clock", "gpu/throttle_power", "gpu/throttle_sw_thermal"),
        *("gpu/throttle_hw_thermal", "gpu/throttle_brake"),
    ),
    "Links": ("gpu/pcie_tx", "gpu/pcie_rx", "gpu/nvlink_tx", "gpu/nvlink_rx"),
    "Reliability": (
        *("gpu/ecc_corrected", "gpu/ecc_uncorrected", "gpu/remapped_rows"),
        *("gpu/remap_pending", "gpu/remap_failed", "gpu/pcie_replays"),
    ),
}
TEXTS: dict[Unit, Callable[[float], str]] = {
    Unit.PERCENT: lambda value: f"{value:.0f}%",
    Unit.BYTES: format_bytes,
    Unit.BYTES_PER_SECOND: lambda value: f"{format_bytes(value)}/s",
    Unit.WATT: lambda value: f"{value:.0f} W",
    Unit.JOULE: format_energy,
    Unit.SECOND: format_duration,
    Unit.CELSIUS: lambda value: f"{value:.0f} °C",
    Unit.MEGAHERTZ: lambda value: f"{value:,.0f} MHz",
    Unit.COUNT: lambda value: f"{value:,.0f}",
}


def host_facts(host: HostState) -> list[str]:
    """Return what identifies the host and how busy it is, each as a short text."""
    busy = "n/a" if host.cpu_percent is None else f"{host.cpu_percent:.0f}%"
    return [
        f"{host.cpu}, {host.cores or '?'} cores: {busy} busy",
        f"memory {of_total(host.memory_used, host.memory_total)}",
        f"driver {host.driver or 'none'}",
        f"CUDA of the driver {host.cuda or 'none'}",
        f"PyTorch {host.torch or 'not installed'}",
        f"Python {host.python}",
        host.platform,
    ]


def of_total(used: float, total: float | None) -> str:
    """Return used bytes in the unit of the total.

    >>> of_total(3 * 2**30, 80 * 2**30)
    '3.00 of 80.0 GiB'
    """
    if not total:
        return format_bytes(used)
    whole = format_bytes(total)
    part = format_bytes(used)
    number, _, unit = part.partition(" ")
    part = number if whole.endswith(f" {unit}") else part
    return f"{part} of {whole}"


def gpu_rows(view: MachineState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> list[Row]:
    """Return a row per GPU, and below it one per MIG instance.

    `cuda`: torch's index by UUID, `ours`: names of recorded runs by pid.
    """
    rows: list[Row] = []
    for device in view.devices:
        index = cuda.get(device.info.uuid)
        health = device.health
        rows.append(
            {
                "GPU": f"GPU {device.info.nvml_index}",
                **_load(device),
                "Health": f"{LEVELS[health.level.value]} {health.text}",
                "Temperature": device.values.get("gpu/temp"),
                "Power": device.values.get("gpu/power"),
                "SM clock": device.values.get("gpu/sm_clock"),
                "Processes": _processes_text(device, ours),
                "Name": device.info.name,
                "Torch": None if index is None else f"cuda:{index}",
            }
        )
        rows += [
            {"GPU": "MIG", **_load(instance), "Name": instance_name(instance)}
            for instance in device.instances
        ]
    return rows


def _load(device: DeviceState) -> Row:
    """Return utilization and memory; a missing memory has its reason."""
    used = device.values.get("gpu/mem_used")
    total = device.values.get("gpu/mem_total", device.info.memory_total)
    return {
        "Utilization": device.values.get("gpu/util"),
        "Memory": None if used is None or not total else 100 * used / total,
        "Memory used": _missing(device, "gpu/mem_used") if used is None else of_total(used, total),
    }


def _missing(device: DeviceState, key: str) -> str:
    """Return why a value is missing; the health of a lost GPU has its reason."""
    if device.lost is not None:
        return "n/a"
    return f"n/a: {device.missing.get(key, 'no answer yet')}"


def _processes_text(device: DeviceState, ours: Mapping[int, str]) -> str:
    """Return the processes of a GPU in one line: recorded runs first, then the largest."""
    if device.processes is None:
        return _missing(device, "processes")
    order = sorted(device.processes, key=lambda one: (one.pid not in ours, -(one.memory or 0)))
    shown = [f"{owner(one, ours)}: {one.name} {_bytes(one.memory)}" for one in order[:2]]
    more = [f"{len(order) - 2} more"] if len(order) > 2 else []
    return ", ".join(shown + more) or "none"


def _bytes(size: float | None) -> str:
    return "" if size is None else format_bytes(size)


def owner(process: GpuProcess, ours: Mapping[int, str]) -> str:
    """Return the owner of a process: a recorded run, "you", or another user."""
    if process.pid in ours:
        return f"run {ours[process.pid]}"
    return "you" if process.yours else process.user


def instance_name(instance: DeviceState) -> str:
    return instance.info.mig_profile or instance.info.name


def process_rows(device: DeviceState, ours: Mapping[int, str]) -> list[Row]:
    """Return the processes of a GPU and of its MIG instances."""
    placed = [("", process) for process in device.own_processes or ()]
    for instance in device.instances:
        placed += [(instance_name(instance), process) for process in instance.processes or ()]
    return [
        {
            "PID": process.pid,
            "Owner": owner(process, ours),
            "User": process.user,
            "Memory": _bytes(process.memory),
            "Kind": str(process.kind),
            "State": process.state,
            "MIG": instance,
            "Command": process.command or process.name,
        }
        for instance, process in placed
    ]


def value_rows(device: DeviceState) -> list[Row]:
    """Return all values of a GPU with their meaning, or why they are missing."""
    rows = [_row(group, *_metric(device, key)) for group, keys in VALUES.items() for key in keys]
    facts = device.facts
    if facts is not None and facts.pcie_gen is not None:
        now = _link(facts.pcie_gen, facts.pcie_width)
        pcie = f"{now}, at most {_link(facts.pcie_max_gen, facts.pcie_max_width)}"
        about = "An idle GPU slows its link to save power; under load it should be at its maximum."
        rows.append(_row("Links", "PCIe link", pcie, about))
    xids = "; ".join(f"{xid.text}, {format_duration(xid.age_s)} ago" for xid in device.xids[::-1])
    none = f"n/a: {device.missing['xid']}" if "xid" in device.missing else "none seen"
    about = "Errors that the driver reported while the Hardware page was open, newest first."
    rows.append(_row("Reliability", "Xid errors", xids or none, about))
    rows.append(_row("Identity", "UUID", device.info.uuid, "Stable; indices can change."))
    return sorted(rows, key=lambda row: [*VALUES, "Identity"].index(row["Group"]))


def _link(generation: int | None, width: int | None) -> str:
    """Format a PCIe link, with "?" for an unknown value."""
    return f"gen {generation or '?'} ×{width or '?'}"


def _row(group: str, label: str, text: str, meaning: str) -> Row:
    return {"Group": group, "Value": label, "Reading": text, "Meaning": meaning}


def _metric(device: DeviceState, key: str) -> tuple[str, str, str]:
    """Return label, text and meaning of a metric."""
    metric = BY_KEY[key]
    value = device.values.get(key)
    text = _missing(device, key) if value is None else TEXTS[metric.unit](value)
    return metric.label[:1].upper() + metric.label[1:], text, metric.meaning


# Distinct, with a contrast of at least 3:1 on the light and the dark background.
COLORS = ("#8d5df8", "#8a9220", "#0b93b8", "#db3cfc", "#e0455a", "#a9701a", "#0a9a75", "#7a8490")
MIN_SPAN_S = 60  # the first seconds do not fill the width
MAX_SPAN_S = 600


def history_figure(
    metric: str, gpus: Sequence[DeviceInfo], past: Sequence[PastReading], now: float
) -> Json:
    """Return the last ten minutes of a metric, a line per GPU by its index."""
    unit = BY_KEY[metric].unit
    ages = np.round([reading.ts - now for reading in past], 1)
    columns = {
        gpu.nvml_index: np.array(
            [reading.gpus.get(gpu.uuid, {}).get(metric) for reading in past], float
        )
        for gpu in gpus
    }
    top = max((float(np.nanmax(values, initial=0.0)) for values in columns.values()), default=0.0)
    name, size = figures.unit_of(top) if unit is Unit.BYTES else (unit.value, 1.0)
    lines: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"GPU {index}",
            "x": ages,
            "y": np.round(values / size, 3),
            "line": {"color": COLORS[index % len(COLORS)], "width": 1.6},
        }
        for index, values in columns.items()
    ]
    span = np.clip(-ages[0], MIN_SPAN_S, MAX_SPAN_S)
    fixed = (0.0, 100.0) if unit is Unit.PERCENT else None
    layout = figures.layout(
        260,
        showlegend=True,
        hovermode="x unified",
        xaxis=figures.FIXED | {"range": [-span, 0], "ticksuffix": " s"},
        yaxis=figures.FIXED | {"ticksuffix": f" {name}", "rangemode": "tozero", "range": fixed},
    )
    return {"data": lines, "layout": layout}
