"""The details of one GPU on the page Devices, as JSON of ready words; pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

from dashboard.machine.charts import LINKS, charts
from dashboard.machine.content import Json, absent, of_total, owner, short_uuid
from dashboard.machine.run_energy import RunEnergy
from stepscope.common.formatting import format_bytes, format_duration, format_energy
from stepscope.gpu.device_events import throttle_text
from stepscope.gpu.health import link
from stepscope.gpu.machine_state import DeviceState
from stepscope.gpu.processes import GpuProcess
from stepscope.metrics import BY_KEY, Unit

NOBODY = "No processes on this GPU."
DIFFERENCE = (
    "Utilization is the share of time with at least one kernel running, however small: at 100 "
    "% most of the chip may be idle. SM, tensor and DRAM activity show how much of it worked "
    "(Hopper and newer)."
)
Row = tuple[str, str, str, bool]
"""Label, text, help, and whether the value is missing."""


def details(
    device: DeviceState,
    since: float,
    run: RunEnergy | None,
    ours: Mapping[int, str],
    torchs: str = "not known yet",
    seen: Collection[str] | None = None,
) -> Json:
    """Return everything that is known of a GPU; `since` is when this server first looked.

    `torchs` is the name that the server's torch has for it, or why it has none. `seen` are the
    metrics that have had a value before; a lost GPU has none now, but its charts stay.
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
            for title, rows in _groups(device, since, run, torchs)
        ],
        "run": None if run is None else run.run_id,
        "processes": None if processes is None else [_process(one, ours) for one in processes],
        "no_processes": _no_processes(device),
        "instances": [_instance(instance, ours) for instance in device.instances],
        "charts": charts(device, device.values.keys() if seen is None else seen),
    }


# --- facts ----------------------------------------------------------------------------------------


def _groups(
    device: DeviceState, since: float, run: RunEnergy | None, torchs: str
) -> Iterator[tuple[str, list[Row]]]:
    yield "Activity", [_metric(device, key) for key in ("gpu/util", "gpu/mem_util", *GPM)]
    yield "Memory", list(_memory(device))
    yield "Heat and power", list(_heat(device, since, run))
    yield "Clocks", list(_clocks(device))
    yield "Links", list(_links(device))
    yield "Reliability", [*(_metric(device, key) for key in RELIABILITY), _errors(device)]
    yield "Identity", list(_identity(device, torchs))


GPM = ("gpu/sm_active", "gpu/sm_occupancy", "gpu/tensor_active", "gpu/dram_active")
RELIABILITY = (
    "gpu/ecc_corrected",
    "gpu/ecc_uncorrected",
    "gpu/remapped_rows",
    "gpu/remap_pending",
    "gpu/remap_failed",
    "gpu/pcie_replays",
)


def _metric(device: DeviceState, key: str, after: str = "") -> Row:
    """Return a metric's row: its label and meaning from the table of metrics."""
    metric, value = BY_KEY[key], device.values.get(key)
    label = metric.label[:1].upper() + metric.label[1:]
    if value is None:
        return label, absent(device, key), metric.meaning, True
    age_s = device.ages.get(key, 0.0)
    old = f" ({format_duration(age_s)} ago)" if age_s > OLD_S else ""
    return label, f"{TEXTS[metric.unit](value)}{after}{old}", metric.meaning, False


OLD_S = 30.0
"""Age from which it is said: the rare values are read every 10 s."""

TEXTS: dict[Unit, Callable[[float], str]] = {
    Unit.PERCENT: lambda value: f"{value:.0f} %",
    Unit.BYTES: format_bytes,
    Unit.BYTES_PER_SECOND: lambda value: f"{format_bytes(value)}/s",
    Unit.WATT: lambda value: f"{value:.0f} W",
    Unit.CELSIUS: lambda value: f"{value:.0f} °C",
    Unit.MEGAHERTZ: lambda value: f"{value:,.0f} MHz",
    Unit.COUNT: lambda value: f"{value:,.0f}",
}


def _fact(label: str, value: float | None, text: str, help_text: str) -> Row:
    """Return a row of a fact that the driver gives once; `text` is a format."""
    if value is None:
        return label, "n/a on this GPU: the driver does not tell", help_text, True
    return label, text.format(value), help_text, False


def _memory(device: DeviceState) -> Iterator[Row]:
    used = device.values.get("gpu/mem_used")
    total = device.values.get("gpu/mem_total", device.info.memory_total)
    if used is None:
        yield _metric(device, "gpu/mem_used")
    else:
        meaning = BY_KEY["gpu/mem_used"].meaning
        yield "Device used", of_total(used, total), meaning, False
    yield _metric(device, "gpu/mem_reserved")


def _heat(device: DeviceState, since: float, run: RunEnergy | None) -> Iterator[Row]:
    facts = device.facts
    yield _metric(device, "gpu/temp")
    yield _metric(device, "gpu/temp_mem")
    yield _metric(device, "gpu/temp_margin")
    if facts is not None:
        yield _fact(
            "Slowdown temperature", facts.temp_slowdown, "{:.0f} °C", "The GPU's own threshold."
        )
        yield _fact(
            "Shutdown temperature", facts.temp_shutdown, "{:.0f} °C", "The GPU's own threshold."
        )
    yield _metric(device, "gpu/power")
    default = None if facts is None else facts.power_limit_default
    yield _metric(
        device, "gpu/power_limit", "" if default is None else f" (default {default:.0f} W)"
    )
    yield _metric(device, "gpu/fan")
    yield _energy(device, since)
    if run is not None:
        help_text = "Whole GPU while the active run trained on it, including pauses."
        yield "Energy of the run", run.text, help_text, False


def _energy(device: DeviceState, since: float) -> Row:
    help_text = "Whole GPU, all users, since a page of this server first looked."
    energy = device.energy
    if energy is None:
        return "Energy since first viewed", absent(device, "gpu/energy"), help_text, True
    began = time.strftime("%H:%M:%S", time.localtime(since))
    how = (
        ""
        if energy.from_counter
        else f", estimated from the power in {format_duration(energy.seconds)}"
    )
    return (
        "Energy since first viewed",
        f"{format_energy(energy.joules)} since {began}{how}",
        help_text,
        False,
    )


def _clocks(device: DeviceState) -> Iterator[Row]:
    facts = device.facts
    for key, most in (
        ("gpu/sm_clock", None if facts is None else facts.max_sm_clock),
        ("gpu/mem_clock", None if facts is None else facts.max_mem_clock),
    ):
        yield _metric(device, key, "" if most is None else f" of {most:,.0f}")
    text = throttle_text(device.throttled, device.throttle_window_s)
    help_text = "Time the driver lowered the clocks, by reason; reasons can overlap."
    yield "Clocks lowered", text, help_text, not device.throttled


def _links(device: DeviceState) -> Iterator[Row]:
    facts = device.facts
    help_text = "An idle GPU slows its link to save power; under load it should run at its maximum."
    if facts is None or facts.pcie_gen is None:
        yield "PCIe link", "n/a on this GPU: the driver does not tell", help_text, True
    else:
        now = link(facts.pcie_gen, facts.pcie_width)
        most = link(facts.pcie_max_gen, facts.pcie_max_width)
        yield "PCIe link", f"{now}, at most {most}", help_text, False
    for key in LINKS:
        yield _metric(device, key)


def _errors(device: DeviceState) -> Row:
    help_text = "Errors that the driver reported while a page of this server looked, newest first."
    label, why = "Xid errors", device.missing.get("xid")
    if device.xids:
        newest = device.xids[::-1]
        told = [f"{xid.text}, {format_duration(xid.age_s)} ago" for xid in newest]
        return label, "; ".join(told), help_text, False
    return label, f"n/a: {why}" if why else "none seen", help_text, why is not None


def _identity(device: DeviceState, torchs: str) -> Iterator[Row]:
    info, facts = device.info, device.facts
    yield "UUID", info.uuid, "Stable; indices can change.", False
    yield (
        "NVML index",
        str(info.nvml_index),
        "nvidia-smi's index; torch may number GPUs differently.",
        False,
    )
    yield (
        "Torch's name here",
        torchs,
        "CUDA_VISIBLE_DEVICES hides and renumbers GPUs.",
        False,
    )
    known = (
        []
        if facts is None
        else [
            ("PCI address", facts.pci_bus_id, "Where it is plugged in."),
            ("Architecture", facts.architecture, "NVIDIA's name of the generation."),
            ("CUDA of the driver", facts.cuda_version, "The newest CUDA that the driver can run."),
        ]
    )
    for label, text, help_text in (("Driver", info.driver_version, "NVIDIA's driver."), *known):
        yield label, text or "n/a: the driver does not tell", help_text, text is None
    yield "MIG", "on" if info.mig else "off", "Whether the GPU is divided into instances.", False


# --- processes ------------------------------------------------------------------------------------


def _process(process: GpuProcess, ours: Mapping[int, str]) -> Json:
    states = {"running": "", "zombie": "zombie", "gone": "not visible from here"}
    return {
        "pid": process.pid,
        "user": process.user,
        "whose": owner(process, ours) if process.yours or process.pid in ours else "",
        "memory": "n/a" if process.memory is None else format_bytes(process.memory),
        "sm": "n/a" if process.sm is None else f"{process.sm:.0f} %",
        "kind": str(process.kind),
        "state": states[process.state],
        "command": process.command or process.name,
    }


def _no_processes(device: DeviceState) -> str:
    """Say why the table of processes is empty."""
    if device.processes is None:
        return absent(device, "processes")
    if device.own_processes:
        return ""
    return "Those of its MIG instances stand below." if device.instances else NOBODY


def _instance(instance: DeviceState, ours: Mapping[int, str]) -> Json:
    facts = instance.facts
    used = instance.values.get("gpu/mem_used")
    total = instance.values.get("gpu/mem_total", instance.info.memory_total)
    return {
        "uuid": instance.info.uuid,
        "short": short_uuid(instance.info.uuid),
        "profile": (facts.mig_profile if facts is not None else None) or instance.info.name,
        "memory": absent(instance, "gpu/mem_used") if used is None else of_total(used, total),
        "processes": [_process(process, ours) for process in instance.processes or ()],
        "no_processes": _no_processes(instance),
    }
