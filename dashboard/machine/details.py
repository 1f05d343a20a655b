"""Details and last ten minutes of one GPU on the Hardware page, as JSON. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from dashboard.charts.chart_spec import COLORS
from dashboard.machine.content import Json, absent, instance_name, of_total, owner
from stepscope.common.formatting import format_bytes, format_duration, format_energy
from stepscope.gpu.device_events import throttle_text
from stepscope.gpu.health import link
from stepscope.gpu.machine_monitor import DRAWN, DeviceSample
from stepscope.gpu.machine_state import DeviceState
from stepscope.gpu.processes import GpuProcess
from stepscope.metrics import BY_KEY, Unit

NO_PROCESSES = "No processes on this GPU."
DIFFERENCE = (
    "Utilization is the share of time with at least one kernel running, however small: at 100% "
    "most of the chip may be idle. SM, tensor and DRAM activity show how much of it worked "
    "(Hopper and newer)."
)
ACTIVITY = (
    *("gpu/util", "gpu/mem_util", "gpu/sm_active", "gpu/sm_occupancy"),
    *("gpu/tensor_active", "gpu/dram_active"),
)
RELIABILITY = (
    *("gpu/ecc_corrected", "gpu/ecc_uncorrected"),
    *("gpu/remapped_rows", "gpu/remap_pending", "gpu/remap_failed", "gpu/pcie_replays"),
)
THRESHOLD = "The GPU's own threshold."
ENERGY = "Whole GPU, all users, since this server first read it."
LOWERED = "Time the driver lowered the clocks, by reason; reasons can overlap."
PCIE = "An idle GPU slows its link to save power; under load it should run at its maximum."
XID = "Errors that the driver reported while the Hardware page was open, newest first."
NVML_INDEX = "nvidia-smi's index; torch may number GPUs differently."
MIG = "Whether the GPU is divided into instances."
TEXTS: dict[Unit, Callable[[float], str]] = {
    Unit.PERCENT: lambda value: f"{value:.0f}%",
    Unit.BYTES: format_bytes,
    Unit.BYTES_PER_SECOND: lambda value: f"{format_bytes(value)}/s",
    Unit.WATT: lambda value: f"{value:.0f} W",
    Unit.CELSIUS: lambda value: f"{value:.0f} °C",
    Unit.MEGAHERTZ: lambda value: f"{value:,.0f} MHz",
    Unit.COUNT: lambda value: f"{value:,.0f}",
}
Row = tuple[str, str, str, bool]
"""Label, text, help, and whether the value is missing."""


def details(
    device: DeviceState,
    since: float,
    ours: Mapping[int, str],
    torchs: str = "not known yet",
    seen: Collection[str] | None = None,
) -> Json:
    """Return all values of a GPU; `since` is when this server first read it (epoch seconds).

    `torchs` is the name that the server's torch has for it, or why it has none. `seen` are the
    metrics that have had a value: a lost GPU has none now and keeps its charts.
    """
    processes = device.own_processes
    return {
        "uuid": device.info.uuid,
        "title": f"GPU {device.info.nvml_index}",
        "name": device.info.name,
        "signs": [{"level": sign.level.value, "text": sign.text} for sign in device.health.signs]
        or [{"level": device.health.level.value, "text": device.health.text}],
        "difference": DIFFERENCE,
        "groups": [
            {"title": title, "rows": [list(row) for row in rows]}
            for title, rows in _groups(device, since, torchs).items()
        ],
        "processes": None if processes is None else [_process(one, ours) for one in processes],
        "no_processes": _no_processes(device),
        "instances": [_instance(instance, ours) for instance in device.instances],
        "charts": charts(device, device.values.keys() if seen is None else seen),
    }


def _groups(device: DeviceState, since: float, torchs: str) -> dict[str, list[Row]]:
    info = device.info

    def fact(name: str, text: str = "{}") -> str | None:
        """Return a property of the device as text; None if the driver does not report it."""
        value = getattr(device.facts, name, None)
        return None if value is None else text.format(value)

    def metrics(*keys: str) -> list[Row]:
        return [_metric(device, key) for key in keys]

    clocks = {
        "gpu/sm_clock": fact("max_sm_clock", " of {:,.0f}"),
        "gpu/mem_clock": fact("max_mem_clock", " of {:,.0f}"),
    }
    throttled = throttle_text(device.throttled, device.throttle_window_s)
    pcie = None
    if device.facts is not None and device.facts.pcie_gen is not None:
        now = link(device.facts.pcie_gen, device.facts.pcie_width)
        pcie = f"{now}, at most {link(device.facts.pcie_max_gen, device.facts.pcie_max_width)}"
    return {
        "Activity": metrics(*ACTIVITY),
        "Memory": [_memory(device), *metrics("gpu/mem_reserved")],
        "Heat and power": [
            *metrics("gpu/temp", "gpu/temp_mem", "gpu/temp_margin"),
            _known("Slowdown temperature", fact("temp_slowdown", "{:.0f} °C"), THRESHOLD),
            _known("Shutdown temperature", fact("temp_shutdown", "{:.0f} °C"), THRESHOLD),
            *metrics("gpu/power", "gpu/power_limit", "gpu/fan"),
            _energy(device, since),
        ],
        "Clocks": [
            *(_metric(device, key, most or "") for key, most in clocks.items()),
            ("Clocks lowered", throttled, LOWERED, not device.throttled),
        ],
        "Links": [
            _known("PCIe link", pcie, PCIE),
            *metrics("gpu/pcie_tx", "gpu/pcie_rx", "gpu/nvlink_tx", "gpu/nvlink_rx"),
        ],
        "Reliability": [*metrics(*RELIABILITY), _errors(device)],
        "Identity": [
            _known("UUID", info.uuid, "Stable; indices can change."),
            _known("NVML index", str(info.nvml_index), NVML_INDEX),
            _known("Torch's name here", torchs, "CUDA_VISIBLE_DEVICES hides and renumbers GPUs."),
            _known("PCI address", fact("pci_bus_id"), "PCI bus, device and function."),
            _known("Architecture", fact("architecture"), "NVIDIA's name of the generation."),
            _known("MIG", "on" if info.mig else "off", MIG),
        ],
    }


def _known(label: str, text: str | None, help_text: str) -> Row:
    return label, text or "n/a on this GPU: not reported by the driver", help_text, text is None


def _metric(device: DeviceState, key: str, after: str = "") -> Row:
    """Return the row of a metric with the label and meaning of the metric table."""
    metric, value = BY_KEY[key], device.values.get(key)
    label = metric.label[:1].upper() + metric.label[1:]
    if value is None:
        return label, absent(device, key), metric.meaning, True
    return label, f"{TEXTS[metric.unit](value)}{after}", metric.meaning, False


def _memory(device: DeviceState) -> Row:
    used = device.values.get("gpu/mem_used")
    if used is None:
        return _metric(device, "gpu/mem_used")
    total = device.values.get("gpu/mem_total", device.info.memory_total)
    return "Device used", of_total(used, total), BY_KEY["gpu/mem_used"].meaning, False


def _energy(device: DeviceState, since: float) -> Row:
    label, energy = "Energy since first viewed", device.energy
    if energy is None:
        return label, absent(device, "gpu/energy"), ENERGY, True
    began = time.strftime("%H:%M:%S", time.localtime(since))
    estimated = f", estimated from the power in {format_duration(energy.seconds)}"
    how = "" if energy.from_counter else estimated
    return label, f"{format_energy(energy.joules)} since {began}{how}", ENERGY, False


def _errors(device: DeviceState) -> Row:
    label, why = "Xid errors", device.missing.get("xid")
    if device.xids:
        newest = device.xids[::-1]
        texts = [f"{xid.text}, {format_duration(xid.age_s)} ago" for xid in newest]
        return label, "; ".join(texts), XID, False
    return label, f"n/a: {why}" if why else "none seen", XID, why is not None


def _process(process: GpuProcess, ours: Mapping[int, str]) -> Json:
    states = {"running": "", "zombie": "zombie", "gone": "hidden or ended"}
    return {
        "pid": process.pid,
        "user": process.user,
        "whose": owner(process, ours) if process.yours or process.pid in ours else "",
        "memory": "n/a" if process.memory is None else format_bytes(process.memory),
        "sm": "n/a" if process.sm is None else f"{process.sm:.0f}%",
        "kind": str(process.kind),
        "state": states[process.state],
        "command": process.command or process.name,
    }


def _no_processes(device: DeviceState) -> str:
    if device.processes is None:
        return absent(device, "processes")
    if device.own_processes:
        return ""
    return (
        "The processes of its MIG instances are listed below." if device.instances else NO_PROCESSES
    )


def _instance(instance: DeviceState, ours: Mapping[int, str]) -> Json:
    used = instance.values.get("gpu/mem_used")
    total = instance.values.get("gpu/mem_total", instance.info.memory_total)
    return instance_name(instance) | {
        "memory": absent(instance, "gpu/mem_used") if used is None else of_total(used, total),
        "processes": [_process(process, ours) for process in instance.processes or ()],
        "no_processes": _no_processes(instance),
    }


CHARTS: dict[tuple[str, str], tuple[tuple[str, str, str], ...]] = {
    ("Utilization and activity", "%"): (
        ("gpu/util", "utilization", COLORS["gpu/util"]),
        ("gpu/sm_active", "SM active", "blue"),
        ("gpu/tensor_active", "tensor cores", "orange"),
        ("gpu/dram_active", "DRAM", "pink"),
    ),
    ("Memory", "B"): (("gpu/mem_used", "used", COLORS["gpu/mem_used"]),),
    ("Power", "W"): (("gpu/power", "power", COLORS["gpu/power"]),),
    ("Temperature", "°C"): (("gpu/temp", "GPU", COLORS["gpu/temp"]),),
    ("SM clock", "MHz"): (("gpu/sm_clock", "SM clock", "blue"),),
    ("PCIe and NVLink", "B/s"): (
        ("gpu/pcie_tx", "PCIe out", "blue"),
        ("gpu/pcie_rx", "PCIe in", "orange"),
        ("gpu/nvlink_tx", "NVLink out", "green"),
        ("gpu/nvlink_rx", "NVLink in", "pink"),
    ),
}
"""The lines (metric, label, color) of each chart (title, unit)."""


def charts(device: DeviceState, seen: Collection[str]) -> list[Json]:
    """Return the charts of the last ten minutes that have a metric in `seen`."""
    tops = {
        "Utilization and activity": 100.0,
        "Memory": device.values.get("gpu/mem_total", device.info.memory_total),
        "SM clock": getattr(device.facts, "max_sm_clock", None),
    }
    marks = {
        "Power": (device.values.get("gpu/power_limit"), "limit"),
        "Temperature": (getattr(device.facts, "temp_slowdown", None), "slowdown"),
    }
    drawn = []
    for (title, unit), traces in CHARTS.items():
        value, label = marks.get(title, (None, ""))
        lines = [
            {"key": key, "label": name, "color": color}
            for key, name, color in traces
            if key in seen
        ]
        if lines:
            mark = None if value is None else {"value": value, "label": label}
            drawn.append(
                {"title": title, "unit": unit, "top": tops.get(title), "mark": mark, "lines": lines}
            )
    return drawn


def history(readings: list[DeviceSample]) -> Json:
    """Return readings as columns, at the five digits that a chart can show."""
    return {
        "t": [round(reading.ts, 1) for reading in readings],
        "v": {
            key: [
                None if (value := reading.values[place]) is None else float(f"{value:.5g}")
                for reading in readings
            ]
            for place, key in enumerate(DRAWN)
        },
    }
