"""The charts of one GPU's last ten minutes on the page Devices, as JSON; pure."""

from __future__ import annotations

from collections.abc import Collection

from dashboard.charts.chart_spec import COLORS
from dashboard.machine.content import Json
from stepscope.gpu.machine_monitor import DRAWN, DeviceSample
from stepscope.gpu.machine_state import DeviceState

ACTIVITY = {
    "gpu/util": "utilization",
    "gpu/sm_active": "SM active",
    "gpu/tensor_active": "tensor cores",
    "gpu/dram_active": "DRAM",
}
LINKS = {
    "gpu/pcie_tx": "PCIe out",
    "gpu/pcie_rx": "PCIe in",
    "gpu/nvlink_tx": "NVLink out",
    "gpu/nvlink_rx": "NVLink in",
}
_LINE_COLORS = {
    "gpu/sm_active": "blue",
    "gpu/tensor_active": "orange",
    "gpu/dram_active": "pink",
    "gpu/sm_clock": "blue",
    "gpu/pcie_tx": "blue",
    "gpu/pcie_rx": "orange",
    "gpu/nvlink_tx": "green",
    "gpu/nvlink_rx": "pink",
}


def history(readings: list[DeviceSample]) -> Json:
    """Return readings as columns; numbers as short as they can be drawn."""
    return {
        "t": [round(reading.ts, 1) for reading in readings],
        "v": {
            key: [_short(reading.values[place]) for reading in readings]
            for place, key in enumerate(DRAWN)
        },
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def charts(device: DeviceState, seen: Collection[str]) -> list[Json]:
    """Return the charts of the last ten minutes, those of metrics that were `seen`."""
    facts = device.facts
    total = device.values.get("gpu/mem_total", device.info.memory_total)
    limit = device.values.get("gpu/power_limit")
    slowdown = None if facts is None else facts.temp_slowdown
    clock = None if facts is None else facts.max_sm_clock
    wanted = [
        _chart("Utilization and activity", "%", ACTIVITY, 100.0, None),
        _chart("Memory", "B", {"gpu/mem_used": "used"}, total, None),
        _chart("Power", "W", {"gpu/power": "power"}, None, _mark(limit, "limit")),
        _chart("Temperature", "°C", {"gpu/temp": "GPU"}, None, _mark(slowdown, "slowdown")),
        _chart("SM clock", "MHz", {"gpu/sm_clock": "SM clock"}, clock, None),
        _chart("PCIe and NVLink", "B/s", LINKS, None, None),
    ]
    for chart in wanted:
        chart["lines"] = [line for line in chart["lines"] if line["key"] in seen]
    return [chart for chart in wanted if chart["lines"]]


def _chart(
    title: str, unit: str, lines: dict[str, str], top: float | None, mark: Json | None
) -> Json:
    return {
        "title": title,
        "unit": unit,
        "top": top,
        "mark": mark,
        "lines": [
            {"key": key, "label": label, "color": _LINE_COLORS.get(key) or COLORS[key]}
            for key, label in lines.items()
        ],
    }


def _mark(value: float | None, label: str) -> Json | None:
    return None if value is None else {"value": value, "label": label}
