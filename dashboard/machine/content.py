"""The Hardware page as JSON of finished texts: host, cards, details of one GPU. No I/O.

The browser inserts every text as text, never as HTML: names and commands are untrusted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dashboard.charts.chart_spec import COLORS
from stepscope.common.formatting import format_bytes, format_duration, format_energy
from stepscope.gpu.device_events import throttle_text
from stepscope.gpu.health import link
from stepscope.gpu.machine_monitor import DRAWN, DeviceSample
from stepscope.gpu.machine_state import DeviceState, HostState, MachineState
from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NOT_BY_GPU
from stepscope.gpu.processes import GpuProcess
from stepscope.metrics import BY_KEY, Unit

Json = dict[str, Any]

NO_GPU = (
    "Only host data is shown until there is a GPU; checked every 30 s. Training on the CPU "
    "needs no GPU. To use one, install its driver so that nvidia-smi lists it; start "
    "containers with --gpus all. The command 'stepscope doctor' lists what is missing."
)
NO_PROCESSES = "No processes on this GPU."
MIG_PROCESSES = "The processes of its MIG instances are listed below."
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
TEXTS: dict[Unit, Callable[[float], str]] = {
    Unit.PERCENT: lambda value: f"{value:.0f}%",
    Unit.BYTES: format_bytes,
    Unit.BYTES_PER_SECOND: lambda value: f"{format_bytes(value)}/s",
    Unit.WATT: lambda value: f"{value:.0f} W",
    Unit.CELSIUS: lambda value: f"{value:.0f} °C",
    Unit.MEGAHERTZ: lambda value: f"{value:,.0f} MHz",
    Unit.COUNT: lambda value: f"{value:,.0f}",
}
Row = tuple[str, str, str, bool]  # Label, text, help, and whether the value is missing.


def machine_content(view: MachineState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> Json:
    """Return the page; `cuda`: torch's index by UUID, `ours`: names of recorded runs by pid."""
    return {
        "host": host_content(view.host),
        "none": None if view.reason is None else {"reason": view.reason, "next": NO_GPU},
        "cards": [card(device, cuda, ours) for device in view.devices],
    }


def host_content(host: HostState) -> Json:
    return {
        "name": host.name,
        "cpu": {"share": host.cpu_percent, "text": _percent(host.cpu_percent)},
        "memory": _share(host.memory_used, host.memory_total),
        "facts": [
            ["Processor", f"{host.cpu}, {host.cores or '?'} cores"],
            ["Driver", host.driver or "none"],
            ["CUDA of the driver", host.cuda or "none"],
            ["PyTorch", host.torch or "not installed"],
            ["Python", host.python],
            ["System", host.platform],
        ],
    }


def card(device: DeviceState, cuda: Mapping[str, int], ours: Mapping[int, str]) -> Json:
    index = cuda.get(device.info.uuid)
    return {
        "uuid": device.info.uuid,
        "title": f"GPU {device.info.nvml_index}",
        "cuda": None if index is None else f"cuda:{index}",
        "name": device.info.name,
        "short": device.info.short_uuid,
        "level": device.health.level.value,
        "health": device.health.text,
        "utilization": _utilization(device),
        "memory": _memory(device),
        "line": _line(device),
        "who": _who(device, ours),
        "instances": [
            {"profile": _profile(instance), "memory": _memory(instance)}
            for instance in device.instances
        ],
    }


def _absent(device: DeviceState, key: str) -> str:
    why = device.missing.get(key, "no answer yet")
    if why in (NOT_BY_GPU, NOT_BY_DRIVER):
        return "n/a on this GPU" if why == NOT_BY_GPU else "n/a with this driver"
    return f"n/a on this GPU: {why}"


def of_total(used: float, total: float | None) -> str:
    """Return used bytes in the unit of the total, with the percentage.

    >>> of_total(3 * 2**30, 80 * 2**30)
    '3.00 of 80.0 GiB (4%)'
    """
    if not total:
        return format_bytes(used)
    whole, part = format_bytes(total), format_bytes(used)
    number, _, unit = part.partition(" ")
    part = number if whole.endswith(f" {unit}") else part
    return f"{part} of {whole} ({100 * used / total:.0f}%)"


def _utilization(device: DeviceState) -> Json:
    value = device.values.get("gpu/util")
    if value is not None:
        return {"share": value, "text": _percent(value)}
    return _no_share(
        device, "divided by MIG" if device.info.mig else device.missing.get("gpu/util")
    )


def _memory(device: DeviceState) -> Json:
    used = device.values.get("gpu/mem_used")
    if used is None:
        return _no_share(device, device.missing.get("gpu/mem_used"))
    return _share(used, device.values.get("gpu/mem_total", device.info.memory_total))


def _share(used: float, total: float | None) -> Json:
    return {"share": 100 * used / total if total else None, "text": of_total(used, total)}


def _no_share(device: DeviceState, why: str | None) -> Json:
    """Return a missing value with its reason; the health line has that of a lost GPU."""
    return {"share": None, "text": "n/a" if device.lost or not why else f"n/a ({why})"}


def _line(device: DeviceState) -> list[str]:
    """Return temperature, power and clock where they are known."""
    values, limit = device.values, device.values.get("gpu/power_limit")
    power = "{:.0f} W" if limit is None else f"{{:.0f}} of {limit:.0f} W"
    texts = {"gpu/temp": "{:.0f} °C", "gpu/power": power, "gpu/sm_clock": "{:,.0f} MHz"}
    return [text.format(values[key]) for key, text in texts.items() if key in values]


def _who(device: DeviceState, ours: Mapping[int, str]) -> str:
    """Return the processes of the GPU in one line: recorded runs first, then the largest."""
    if device.lost is not None:
        return "Processes unknown."
    if device.instances:
        count = len(device.instances)
        return f"Divided into {count} MIG instance{'' if count == 1 else 's'}."
    if device.processes is None:
        return f"Processes n/a: {device.missing.get('processes', 'not reported by the driver')}"
    if not device.processes:
        return "No processes."
    order = sorted(device.processes, key=lambda one: (one.pid not in ours, -(one.memory or 0)))
    shown = [
        f"{_owner(one, ours)}: {one.name}"
        + ("" if one.memory is None else f" {format_bytes(one.memory)}")
        for one in order[:2]
    ]
    return ", ".join(shown) + (f" and {len(order) - 2} more" if len(order) > 2 else "")


def _owner(process: GpuProcess, ours: Mapping[int, str]) -> str:
    """Return the owner of a process: a recorded run, "you", or another user."""
    if process.pid in ours:
        return f"run {ours[process.pid]}"
    return "you" if process.yours else process.user


def _profile(instance: DeviceState) -> str:
    return str(getattr(instance.facts, "mig_profile", None) or instance.info.name)


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f}%"


def details(
    device: DeviceState, since: float, ours: Mapping[int, str], torchs: str, seen: Collection[str]
) -> Json:
    """Return all values of a GPU; `since` is when this server first read it (epoch seconds).

    `torchs`: torch's name for it, or why none. `seen`: metrics that had a value, as of a lost GPU.
    """
    return {
        "uuid": device.info.uuid,
        "title": f"GPU {device.info.nvml_index}",
        "name": device.info.name,
        "signs": [
            {"level": issue.level.value, "text": issue.text} for issue in device.health.issues
        ]
        or [{"level": device.health.level.value, "text": device.health.text}],
        "difference": DIFFERENCE,
        "groups": [
            {"title": title, "rows": rows} for title, rows in _groups(device, since, torchs).items()
        ],
        "processes": [_process(one, ours) for one in device.own_processes or ()],
        "no_processes": _no_processes(device),
        "instances": [_instance_details(instance, ours) for instance in device.instances],
        "charts": charts(device, seen),
    }


def _groups(device: DeviceState, since: float, torchs: str) -> dict[str, list[Row]]:
    info = device.info

    def fact(name: str, text: str = "{}") -> str | None:
        """Return a property of the device as text; None if the driver does not report it."""
        value = getattr(device.facts, name, None)
        return None if value is None else text.format(value)

    def metrics(*keys: str) -> list[Row]:
        return [_metric(device, key) for key in keys]

    throttled = throttle_text(device.throttled, device.throttle_window_s)
    pcie = None
    if device.facts is not None and device.facts.pcie_gen is not None:
        now = link(device.facts.pcie_gen, device.facts.pcie_width)
        pcie = f"{now}, at most {link(device.facts.pcie_max_gen, device.facts.pcie_max_width)}"
    return {
        "Activity": metrics(*ACTIVITY),
        "Memory": [_memory_row(device), *metrics("gpu/mem_reserved")],
        "Heat and power": [
            *metrics("gpu/temp", "gpu/temp_mem", "gpu/temp_margin"),
            _known("Slowdown temperature", fact("temp_slowdown", "{:.0f} °C"), THRESHOLD),
            _known("Shutdown temperature", fact("temp_shutdown", "{:.0f} °C"), THRESHOLD),
            *metrics("gpu/power", "gpu/power_limit", "gpu/fan"),
            _energy(device, since),
        ],
        "Clocks": [
            _metric(device, "gpu/sm_clock", fact("max_sm_clock", " of {:,.0f}") or ""),
            _metric(device, "gpu/mem_clock", fact("max_mem_clock", " of {:,.0f}") or ""),
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
            _known("MIG", "on" if info.mig else "off", "Whether it is divided into instances."),
        ],
    }


def _known(label: str, text: str | None, help_text: str) -> Row:
    return label, text or "n/a on this GPU: not reported by the driver", help_text, text is None


def _metric(device: DeviceState, key: str, after: str = "") -> Row:
    """Return the row of a metric with the label and meaning of the metric table."""
    metric, value = BY_KEY[key], device.values.get(key)
    label = metric.label[:1].upper() + metric.label[1:]
    if value is None:
        return label, _absent(device, key), metric.meaning, True
    return label, f"{TEXTS[metric.unit](value)}{after}", metric.meaning, False


def _memory_row(device: DeviceState) -> Row:
    label, text, about, is_missing = _metric(device, "gpu/mem_used")
    return label, text if is_missing else _memory(device)["text"], about, is_missing


def _energy(device: DeviceState, since: float) -> Row:
    label, energy = "Energy since first viewed", device.energy
    if energy is None:
        return label, _absent(device, "gpu/energy"), ENERGY, True
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
        "whose": _owner(process, ours) if process.yours or process.pid in ours else "",
        "memory": "n/a" if process.memory is None else format_bytes(process.memory),
        "sm": "n/a" if process.sm is None else f"{process.sm:.0f}%",
        "kind": str(process.kind),
        "state": states[process.state],
        "command": process.command or process.name,
    }


def _no_processes(device: DeviceState) -> str:
    if device.processes is None:
        return _absent(device, "processes")
    return MIG_PROCESSES if device.instances else NO_PROCESSES


def _instance_details(instance: DeviceState, ours: Mapping[int, str]) -> Json:
    return {
        "profile": _profile(instance),
        "short": instance.info.short_uuid,
        "memory": _memory_row(instance)[1],
        "processes": [_process(process, ours) for process in instance.processes or ()],
        "no_processes": _no_processes(instance),
    }


CHARTS: dict[tuple[str, str], tuple[tuple[str, str, str], ...]] = {  # lines of (title, unit)
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
        mark = None if value is None else {"value": value, "label": label}
        lines = [
            {"key": key, "label": name, "color": color}
            for key, name, color in traces
            if key in seen
        ]
        found = {"title": title, "unit": unit, "top": tops.get(title), "mark": mark, "lines": lines}
        drawn += [found] if lines else []
    return drawn


def history(readings: list[DeviceSample]) -> Json:
    """Return readings as columns, at the five digits that a chart can show."""
    columns = zip(*(reading.values for reading in readings), strict=True)
    return {
        "t": [round(reading.ts, 1) for reading in readings],
        "v": {
            key: [None if value is None else float(f"{value:.5g}") for value in column]
            for key, column in zip(DRAWN, columns, strict=False)  # none without readings
        },
    }
